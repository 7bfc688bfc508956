"""Fields of the latency results, from measured values made up here."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.latency_figures import memory_figures, over_greedy, start_figures, steady_figures
from bench.latency_rounds import Steady
from bench.step_bytes import StepBytes


def test_a_steady_step_is_compared_with_the_device_and_the_read_ceiling():
    steady = Steady(steps=9, seconds=0.004, context=100.0, host_us={"build": 12.34}, batch=None)
    found = steady_figures(steady, 0.0032, StepBytes(1_000_000, 2_000, 30), 16, 2.0)
    # 1,000,000 + 16 x (2,000 + 100 x 30) of the 8,000,000 bytes that 4 ms at 2 GB/s have room for.
    assert found == {
        "steady_tpot_ms": 4.0,
        "steady_steps": 9,
        "device_step_ms": 3.2,
        "steady_over_device": 1.25,
        "host_us": {"build": 12.3},
        "context": 100.0,
        "step_read_bytes": 1_080_000,
        "step_written_bytes": 16 * 2030,
        "read_share": 0.135,
    }


def test_sampling_is_compared_with_the_greedy_row_of_its_kind():
    def row(batch: int, temperature: float, time: float | None) -> dict[str, Any]:
        fields = {} if time is None else {"steady_tpot_ms": time}
        shape = {"prompt_tokens": 1, "output_tokens": 2, "batch": batch}
        return shape | {"sampling": {"temperature": temperature}} | fields

    rows = [row(1, 0.0, 4.0), row(16, 0.0, 5.0), row(16, 0.7, 9.0), row(64, 0.0, None)]
    assert over_greedy(row(16, 1.0, 6.0), rows) == 1.2
    assert over_greedy(row(16, 0.0, 6.0), rows) is None
    assert over_greedy(row(64, 1.0, 6.0), rows) is None
    assert over_greedy(row(32, 1.0, 6.0), rows) is None


def test_a_peak_from_before_the_engine_is_not_the_engines():
    assert memory_figures(1000, 950, 400) == {
        "planned_bytes": 1000,
        "peak_bytes": 950,
        "peak_over_planned": 0.95,
    }
    assert memory_figures(1000, 4000, 4000) == {"planned_bytes": 1000}
    assert memory_figures(1000, None, None) == {"planned_bytes": 1000}


def test_a_start_is_what_loading_compiling_and_rehearsing_took():
    runner = SimpleNamespace(compile_seconds=20.0, rehearse_seconds=3.0, num_programs=21)
    counter = SimpleNamespace(num_compiled=1, num_cache_hits=20)
    loaded: Any = SimpleNamespace(engine=SimpleNamespace(runner=runner, compile_counter=counter))
    expected = {
        "start_to_ready_seconds": 31.0,
        "load_seconds": 5.0,
        "compile_seconds": 20.0,
        "rehearse_seconds": 3.0,
        "programs": 21,
    }
    counts = {"compiled": 1, "cache_hits": 20}
    assert start_figures(loaded, 28.0, 31.0) == pytest.approx(expected | counts)
    loaded.engine.compile_counter = None
    assert start_figures(loaded, 28.0, 31.0) == pytest.approx(expected)
