"""What the device does at most: the arithmetic on a clock of our own, and one small measurement."""

import jax.numpy as jnp
import pytest

from bench import ceilings
from bench.ceilings import measure_ceilings, seconds_a_call


def test_the_first_call_is_not_timed_and_the_median_is_taken():
    # Three rounds of four calls take 8, 40 and 4 seconds.
    clock = iter([0.0, 8.0, 10.0, 50.0, 60.0, 64.0])
    calls = []

    def function(number: int):
        calls.append(number)
        return jnp.zeros(())

    assert seconds_a_call(function, 7, calls=4, repeats=3, clock=lambda: next(clock)) == 2.0
    assert calls == [7] * (1 + 3 * 4)


def test_the_ceilings_of_this_machine_are_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "MATMULS", {"cpu": ((16, 32, 64),)})
    found = measure_ceilings()
    assert found["read_bytes"] == 2**20
    assert found["read_gb_per_s"] > 0
    assert list(found["matmul_tflops"]) == ["16x32x64"]


def test_rates_are_bytes_and_operations_over_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "seconds_a_call", lambda *_: 0.5)
    assert ceilings.read_bandwidth(2**20) == 2**21
    assert ceilings.matmul_rate(2, 3, 5) == 4 * 2 * 3 * 5


def test_what_is_summed_and_multiplied_is_no_array_of_zeros():
    numbers = ceilings._numbers(64, 64).astype(jnp.float32)
    assert abs(float(numbers.mean())) < 0.05
    assert float(numbers.std()) == pytest.approx(12**-0.5, rel=0.1)
    assert len(jnp.unique(numbers)) > 1000
