"""The engine core: refusals, aborts, failures, and what comes with the tokens."""

import random
from collections.abc import Iterator

import jax
import pytest

from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import Outputs, ids_of, request, run, small_reopened
from tests.support.mixed_requests import VOCABULARY_SIZE, pools_of, random_prompt, random_request


@pytest.fixture(scope="module")
def engine() -> ContinuousBatchingEngine:
    return small_reopened(max_model_len=256)


@pytest.fixture(autouse=True)
def _leaves_no_work(engine: ContinuousBatchingEngine) -> Iterator[None]:
    before = pools_of(engine)
    yield
    assert not engine.has_work()
    assert pools_of(engine) == before
    engine.scheduler.check_invariants()


def requests_of(seed: int, count: int) -> list[Request]:
    draw = random.Random(seed)
    return [random_request(f"r{number}", draw) for number in range(count)]


def alone(engine: ContinuousBatchingEngine, requests: list[Request]) -> dict[str, list[int]]:
    return {one.request_id: ids_of(run(engine, one)[one.request_id]) for one in requests}


def test_aborts_end_their_request_and_nothing_else(engine: ContinuousBatchingEngine):
    requests = requests_of(0, 12)
    expected = alone(engine, requests)
    outputs: Outputs = {one.request_id: [] for one in requests}
    for one in requests:
        engine.submit(one)
    # They run and wait; one a step.
    aborted = ["r0", "r3", "r4", "r11"]
    for name in aborted:
        engine.abort(name)
        free = pools_of(engine)
        engine.abort(name)
        assert pools_of(engine) == free
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
    ended = {name: found[-1].finish_reason for name, found in outputs.items()}
    assert [name for name, reason in ended.items() if reason == "abort"] == [
        "r0",
        "r3",
        "r4",
        "r11",
    ]
    for name, ids in expected.items():
        got = ids_of(outputs[name])
        assert got == (ids[: len(got)] if ended[name] == "abort" else ids)


def test_an_abort_of_what_is_not_there_does_nothing(engine: ContinuousBatchingEngine):
    engine.abort("never")
    assert engine.step() == []


def test_a_dropped_request_is_gone_within_two_steps(engine: ContinuousBatchingEngine):
    before = pools_of(engine)
    prompts = {"decodes": 5, "prefills": 250, "waits": 9}
    for name, length in prompts.items():
        engine.submit(request(name, random_prompt(random.Random(0), length), max_tokens=None))
        engine.step()
    for name in prompts:
        engine.abort(name)
    ended = [*engine.step(), *engine.step()]
    assert {output.request_id for output in ended if output.finish_reason == "abort"} == {*prompts}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
    assert pools_of(engine) == before


def test_prompt_logprobs_come_once_whatever_the_pieces(engine: ContinuousBatchingEngine):
    prompt = random_prompt(random.Random(0), 200)
    asked = request("p", prompt, max_tokens=3, prompt_logprobs=2)
    outputs = run(engine, asked, *requests_of(1, 5))["p"]
    found = outputs[0].prompt_logprobs
    assert found is not None and len(found) == 200 and found[0] is None
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    entries = [entry for entry in found[1:] if entry is not None]
    assert len(entries) == 199
    assert all(len(entry.top) == 2 and entry.token <= entry.top[0][1] + 1e-6 for entry in entries)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(logit_bias={VOCABULARY_SIZE: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[VOCABULARY_SIZE]), "stop_token_ids"),
        (SamplingParams(min_tokens=60, max_tokens=100), "min_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_can_never_be_met_are_refused_by_name(
    engine: ContinuousBatchingEngine, params: SamplingParams, param: str
):
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(Request("x", (1,) * 200, params))
    assert caught.value.param == param


def test_what_no_pool_could_ever_hold_is_refused_with_what_would_fit():
    # Nine pages of 16 tokens: 144.
    engine = small_reopened(num_pages=10)
    run(engine, request("fits", (1,) * 100, max_tokens=45))
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(request("too long", (1,) * 100, max_tokens=46))
    assert caught.value.param == "max_tokens"
    assert not engine.has_work()


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(engine: ContinuousBatchingEngine):
    first = request("same", (1, 2), max_tokens=5)
    engine.submit(first)
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(request("same", (3,), max_tokens=9))
    assert caught.value.param == "request_id"
    assert len(ids_of(run(engine)["same"])) == 5


def test_an_id_may_come_back_while_a_step_of_its_last_owner_runs(engine: ContinuousBatchingEngine):
    again = request("same", (9, 8, 7), max_tokens=20)
    expected = alone(engine, [again])
    engine.submit(request("same", (1, 2), max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.abort("same")
    outputs = run(engine, again)["same"]
    assert [output.finish_reason for output in outputs if output.finish_reason] == [
        "abort",
        "length",
    ]
    assert ids_of(outputs) == expected["same"]


def test_a_device_failure_ends_what_runs_and_the_engine_goes_on(
    engine: ContinuousBatchingEngine, monkeypatch: pytest.MonkeyPatch
):
    requests = requests_of(2, 2)
    expected = alone(engine, requests)
    failures = engine.stats().device_failures
    for one in requests:
        engine.submit(one)
    engine.step()

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "dispatch", fail)
        ended = engine.step()
    assert {output.request_id for output in ended} == {"r0", "r1"}
    for output in ended:
        assert output.error == "the device failed: RESOURCE_EXHAUSTED: out of memory"
    assert engine.stats().device_failures == failures + 1
    assert not engine.has_work()
    assert alone(engine, requests) == expected


@pytest.mark.parametrize("place", ["dispatch", "collect"])
def test_an_interrupt_ends_what_runs_and_is_raised(
    engine: ContinuousBatchingEngine, monkeypatch: pytest.MonkeyPatch, place: str
):
    asked = request("i", (4, 5), max_tokens=12)
    expected = alone(engine, [asked])
    engine.submit(asked)
    engine.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    (output,) = engine.step()
    assert (output.request_id, output.error) == ("i", "a step was interrupted")
    assert alone(engine, [asked]) == expected
