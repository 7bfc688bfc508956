"""The fake engine keeps the engine's contract: what is tested on it holds for the real one."""

import subprocess
import sys
from typing import Any

import pytest

from qwen35_jax.engine.fake import FakeEngine, hashed_id
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams

VOCABULARY_SIZE = 320


def request(request_id: str = "a", prompt: tuple[int, ...] = (1, 2), **params: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(**params))


def run(engine: FakeEngine) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_ids_are_a_function_of_prompt_and_position():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE)
    engine.submit(request("a", (1, 2), max_tokens=4))
    engine.submit(request("b", (1, 3), max_tokens=4))
    engine.submit(request("c", (1, 2), max_tokens=4))
    outputs = run(engine)
    expected = [hashed_id((1, 2), position, VOCABULARY_SIZE) for position in range(4)]
    assert ids(outputs["a"]) == ids(outputs["c"]) == expected
    assert ids(outputs["b"]) != expected
    assert all(0 <= token_id < VOCABULARY_SIZE for token_id in expected)


def test_max_tokens_ends_as_length_on_the_last_token_only():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE)
    engine.submit(request(max_tokens=3))
    assert [output.finish_reason for output in run(engine)["a"]] == [None, None, "length"]


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, max_model_len=10)
    engine.submit(request(prompt=(1, 2, 3), max_tokens=None))
    assert len(ids(run(engine)["a"])) == 7


def test_script_gives_the_ids_and_repeats_the_last():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, script=lambda prompt: [*prompt, 7])
    engine.submit(request(prompt=(5, 6), max_tokens=5))
    assert ids(run(engine)["a"]) == [5, 6, 7, 7, 7]


@pytest.mark.parametrize(
    ("params", "expected", "reason"),
    [
        ({}, [4, 9], "stop"),
        ({"ignore_eos": True}, [4, 9, 5, 5], "length"),
        ({"ignore_eos": True, "stop_token_ids": [5]}, [4, 9, 5], "stop"),
        ({"stop_token_ids": [4]}, [4], "stop"),
    ],
)
def test_stop_ids_end_a_request(params: dict[str, Any], expected: list[int], reason: str):
    engine = FakeEngine(
        vocabulary_size=VOCABULARY_SIZE, script=lambda _: [4, 9, 5], eos_token_ids=(9,)
    )
    engine.submit(request(max_tokens=4, **params))
    outputs = run(engine)["a"]
    assert ids(outputs) == expected
    assert outputs[-1].finish_reason == reason
    assert outputs[-1].stop_reason == (expected[-1] if reason == "stop" else None)


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_hold_as_many_top_ids_as_asked(count: int):
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, script=lambda _: [319])
    engine.submit(request(max_tokens=1, logprobs=count))
    logprobs = run(engine)["a"][0].logprobs
    assert logprobs is not None and len(logprobs) == 1
    entry = logprobs[0]
    assert entry.token == -0.5
    assert entry.top == ((319, -0.5), (0, -1.5), (1, -2.5))[:count]


def test_no_logprobs_unless_asked():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE)
    engine.submit(request(max_tokens=1))
    assert run(engine)["a"][0].logprobs is None


def test_only_max_num_seqs_run_and_the_others_wait_in_order():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, max_num_seqs=2)
    for name in "abc":
        engine.submit(request(name, max_tokens=2))
    assert [output.request_id for output in engine.step()] == ["a", "b"]
    assert (engine.running_count, engine.waiting_count) == (2, 1)
    engine.step()
    assert [output.request_id for output in engine.step()] == ["c"]


def test_abort_ends_running_and_waiting_requests_with_one_output_each():
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, max_num_seqs=1)
    engine.submit(request("running", max_tokens=9))
    engine.submit(request("waiting", max_tokens=9))
    engine.step()
    for request_id in ("running", "waiting", "waiting", "unknown"):
        engine.abort(request_id)
    assert engine.has_work()
    assert engine.step() == [
        TokenOutput("running", finish_reason="abort"),
        TokenOutput("waiting", finish_reason="abort"),
    ]
    assert not engine.has_work()
    assert (engine.running_count, engine.waiting_count) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "code"), [((), None), (tuple(range(10)), "context_length_exceeded")]
)
def test_prompts_that_can_never_run_are_refused(prompt: tuple[int, ...], code: str | None):
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, max_model_len=10)
    with pytest.raises(InvalidRequestError) as refusal:
        engine.submit(request(prompt=prompt))
    assert (refusal.value.param, refusal.value.code) == ("prompt", code)
    assert not engine.has_work()


def test_importing_it_imports_no_jax():
    program = "import sys, qwen35_jax.engine.fake; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
