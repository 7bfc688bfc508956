"""How much of the device there is to plan with, and asking JAX for it."""

import os
from dataclasses import dataclass

import jax
import pytest

from qwen35_jax import device_memory
from qwen35_jax.device_memory import memory_budget, reserve_device_memory
from qwen35_jax.errors import ConfigError

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NEW, OLD):
        # Set before deleting, so that what the code sets goes away with the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def _jax_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "backends_are_initialized", lambda: False)


@dataclass
class Device:
    statistics: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.statistics


def with_device(monkeypatch: pytest.MonkeyPatch, **statistics: int) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device(statistics or None)])


@pytest.mark.usefixtures("_jax_is_new")
def test_share_is_asked_for_before_jax_meets_its_devices():
    assert reserve_device_memory(0.85)
    assert os.environ[NEW] == "0.85"
    assert not reserve_device_memory(0.5)
    assert os.environ[NEW] == "0.85"


@pytest.mark.parametrize("name", [NEW, OLD])
@pytest.mark.usefixtures("_jax_is_new")
def test_share_of_the_environment_stays(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "0.4")
    assert not reserve_device_memory(0.9)
    assert {key: os.environ.get(key) for key in (NEW, OLD)} == {NEW: None, OLD: None} | {
        name: "0.4"
    }


def test_nothing_is_set_once_jax_knows_its_devices():
    jax.devices()
    assert not reserve_device_memory(0.9)
    assert NEW not in os.environ


@pytest.mark.parametrize("value", ["lots", "nan", "-1", "0"])
@pytest.mark.usefixtures("_jax_is_new")
def test_share_that_jax_cannot_read_is_named(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NEW, value)
    with pytest.raises(ConfigError, match=f"{NEW} must be a positive number, not '{value}'"):
        reserve_device_memory(0.9)


@pytest.mark.usefixtures("_jax_is_new")
def test_both_spellings_at_once_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NEW, "0.9")
    monkeypatch.setenv(OLD, "0.9")
    with pytest.raises(ConfigError, match=f"{NEW} and {OLD} are both set"):
        reserve_device_memory(0.9)


def test_cpu_states_no_limit(monkeypatch: pytest.MonkeyPatch):
    assert memory_budget(0.9, weight_bytes=0) is None
    with_device(monkeypatch, bytes_in_use=5)
    assert memory_budget(0.9, weight_bytes=0) is None


@pytest.mark.parametrize(
    ("taken", "utilization", "budget"),
    [
        ("0.9", 0.9, 9000),  # all that JAX took, as asked
        ("0.9", 0.45, 4500),
        ("0.5", 0.9, 5000),  # the environment allows less than is asked for
        (None, 0.9, 7500),  # JAX was there first, with its own share
        (None, 0.6, 6000),
    ],
)
def test_budget_is_a_share_of_the_whole_device(
    taken: str | None, utilization: float, budget: int, monkeypatch: pytest.MonkeyPatch
):
    if taken is not None:
        monkeypatch.setenv(NEW, taken)
    limit = int(10_000 * float(taken or 0.75))
    with_device(monkeypatch, bytes_limit=limit, bytes_in_use=1000)
    assert memory_budget(utilization, weight_bytes=1000) == pytest.approx(budget, abs=1)


def test_what_else_the_process_holds_is_not_in_the_budget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NEW, "0.9")
    with_device(monkeypatch, bytes_limit=9000, bytes_in_use=1300)
    assert memory_budget(0.9, weight_bytes=1000) == 8700
    # Weights may be counted a little smaller than the device's blocks.
    assert memory_budget(0.9, weight_bytes=1400) == 9000
