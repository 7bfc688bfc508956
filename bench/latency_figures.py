"""Fields of bench.latency's results, from what was measured."""

from collections.abc import Sequence
from typing import Any

from bench.latency_rounds import Steady
from bench.step_bytes import StepBytes, read_share
from qwen35_jax.loading import LoadedEngine


def steady_figures(
    steady: Steady, device_seconds: float, bytes_: StepBytes, batch: int, gb_per_s: float
) -> dict[str, Any]:
    needed = bytes_.read(batch, steady.context)
    return {
        "steady_tpot_ms": round(1000 * steady.seconds, 4),
        "steady_steps": steady.steps,
        "device_step_ms": round(1000 * device_seconds, 4),
        "steady_over_device": round(steady.seconds / device_seconds, 4),
        "host_us": {name: round(time, 1) for name, time in steady.host_us.items()},
        "context": round(steady.context, 1),
        "step_read_bytes": round(needed),
        "step_written_bytes": bytes_.written(batch),
        "read_share": round(read_share(needed, steady.seconds, gb_per_s), 4),
    }


def over_greedy(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """A sampled row's steady TPOT over that of the greedy row of its shape and batch."""
    same = ("prompt_tokens", "output_tokens", "batch")
    for other in rows:
        if (
            other["sampling"]["temperature"] == 0 < row["sampling"]["temperature"]
            and all(other[name] == row[name] for name in same)
            and "steady_tpot_ms" in other
        ):
            return round(row["steady_tpot_ms"] / other["steady_tpot_ms"], 4)
    return None


def memory_figures(planned: int, peak: int | None, peak_before: int | None) -> dict[str, Any]:
    """planned: bytes by the memory plan. peak: the device's so far, None where it says none.
    peak_before: the same before the engine was loaded, which must not be taken for the engine's."""
    if peak is None or peak == peak_before:
        return {"planned_bytes": planned}
    return {
        "planned_bytes": planned,
        "peak_bytes": peak,
        "peak_over_planned": round(peak / planned, 4),
    }


def start_figures(loaded: LoadedEngine, loading: float, ready: float) -> dict[str, Any]:
    """loading: seconds of load_engine. ready: from the command's start, the ceilings left out."""
    runner, counter = loaded.engine.runner, loaded.engine.compile_counter
    figures = {
        "start_to_ready_seconds": round(ready, 2),
        "load_seconds": round(loading - runner.compile_seconds - runner.rehearse_seconds, 2),
        "compile_seconds": round(runner.compile_seconds, 2),
        "rehearse_seconds": round(runner.rehearse_seconds, 2),
        "programs": runner.num_programs,
    }
    if counter is not None:
        figures |= {"compiled": counter.num_compiled, "cache_hits": counter.num_cache_hits}
    return figures
