"""Steps of the engine run again back to back, and profiled: what they leave behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.latency_rounds import run_round, steady_part
from bench.latency_run import back_to_back_seconds, trace_decode
from bench.step_trace import TraceError
from qwen35_jax.engine.core import ContinuousBatchingEngine
from tests.support.engines import default_llm, fast_compilation, ids_of, reopened, request, run


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def engine_of(rows: int) -> ContinuousBatchingEngine:
    return reopened(default_llm().loaded.engine, max_num_seqs=rows)


def test_steps_run_again_harm_no_later_request():
    prompts = [tuple(range(9, 9 + length)) for length in (5, 70)]
    requests = [request(f"r{n}", prompt, max_tokens=8) for n, prompt in enumerate(prompts)]
    expected = {name: ids_of(found) for name, found in run(engine_of(2), *requests).items()}

    engine = engine_of(2)
    steady = steady_part(run_round(engine, requests).steps, 2)
    assert steady is not None
    dispatched: list[Any] = []
    dispatch = engine.runner.dispatch

    def counted(batch: Any) -> Any:
        dispatched.append(batch)
        return dispatch(batch)

    engine.runner.dispatch = counted
    assert back_to_back_seconds(engine, steady.batch, calls=4) > 0
    # One to warm up, and three times four.
    assert dispatched == [steady.batch] * 13
    engine.runner.dispatch = dispatch
    assert {name: ids_of(found) for name, found in run(engine, *requests).items()} == expected


def test_steps_are_not_run_again_while_sequences_own_their_slots():
    engine = engine_of(1)
    one = run_round(engine, [request("r", (1, 2), max_tokens=5)])
    steady = steady_part(one.steps, 1)
    assert steady is not None
    engine.submit(request("next", (1, 2), max_tokens=5))
    with pytest.raises(AssertionError):
        back_to_back_seconds(engine, steady.batch, calls=1)


def test_a_batch_that_never_decodes_together_has_no_profile(tmp_path: Path):
    engine = engine_of(1)
    requests = [request(f"r{n}", (1, 2), max_tokens=4) for n in range(2)]
    with pytest.raises(TraceError, match="decoded all 2 rows"):
        trace_decode(engine, requests, tmp_path)
    assert not engine.has_work()


def test_a_profile_of_rows_that_end_too_early_is_not_kept_for_one_of_all(tmp_path: Path):
    engine = engine_of(1)
    with pytest.raises(TraceError, match="decoded all 1 rows"):
        trace_decode(engine, [request("r", (1, 2), max_tokens=10)], tmp_path)
    assert not engine.has_work()
