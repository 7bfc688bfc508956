"""Continuous batching: whatever runs beside a request, it gets what it gets alone."""

import random
from collections import defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.engine import plan
from qwen35_jax.engine.buckets import Buckets
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.runner import Runner
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.model import delta_rule
from qwen35_jax.model.paged import CachePools, StateSlots
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.step import Sizes
from tests.support.engines import two_layer_params
from tests.support.models import COMPILE_FAST

VOCABULARY, STOP = 78, 5
MAX_LEN, PAGE = 256, 16


def make_engine(
    params,
    *,
    max_num_seqs: int = 7,
    pages: int = 120,
    max_num_batched_tokens: int = 317,
) -> ContinuousBatchingEngine:
    sizes = Sizes(
        num_pages=pages + 1, page_size=PAGE, num_slots=max_num_seqs + 1, max_model_len=MAX_LEN
    )
    max_chunks = max_num_batched_tokens // 64
    runner = Runner(
        params,
        VOCABULARY,
        sizes,
        Buckets.make(max_rows=max_num_seqs, max_chunks=max_chunks, few=True),
    )
    runner.compile(compiler_options=COMPILE_FAST)
    return ContinuousBatchingEngine(
        runner=runner,
        scheduler=Scheduler(
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            page_size=PAGE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_LEN,
            max_chunks=max_chunks,
        ),
        vocabulary_size=VOCABULARY,
        max_model_len=MAX_LEN,
        stop_token_ids=frozenset({STOP}),
    )


@pytest.fixture(scope="module")
def params():
    return two_layer_params()


@pytest.fixture(scope="module")
def engine(params):
    return make_engine(params)


def run(
    engine: ContinuousBatchingEngine, requests: list[Request], *, arrivals: random.Random | None
) -> dict[str, list[TokenOutput]]:
    waiting = list(reversed(requests))
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    while waiting or engine.has_work():
        while waiting and (arrivals is None or arrivals.random() < 0.5):
            engine.submit(waiting.pop())
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
    return outputs


def ids_of(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def random_request(name: str, seed: int) -> Request:
    stream = random.Random(seed)
    greedy = stream.random() < 0.4
    params = SamplingParams(
        temperature=0.0 if greedy else stream.choice([0.7, 1.0, 1.3]),
        top_k=stream.choice([0, 0, 5]),
        top_p=stream.choice([1.0, 0.9]),
        seed=stream.randrange(1000),
        max_tokens=stream.choice([stream.randint(1, 40), 60]),
        min_tokens=stream.choice([0, 0, 1]),
        presence_penalty=stream.choice([0.0, 0.0, 0.7]),
        frequency_penalty=stream.choice([0.0, 0.0, 0.4]),
        repetition_penalty=stream.choice([1.0, 1.0, 1.2]),
        logit_bias=stream.choice([None, None, {3: 4.0, 9: -100.0}]),
        logprobs=stream.choice([None, None, 3]),
        ignore_eos=stream.random() < 0.5,
    )
    length = stream.choice([1, 2, 5, 17, 63, 64, 65, 130, 190])
    prompt = tuple(stream.randrange(VOCABULARY) for _ in range(length))
    return Request(name, prompt, params)


def test_requests_together_get_what_each_gets_alone(params, engine):
    requests = [random_request(f"r{number}", number) for number in range(60)]
    # A pool that is too small for what would like to run, so that sequences are preempted.
    small = make_engine(params, pages=17)
    together = run(small, requests, arrivals=random.Random(0))
    assert small.scheduler.num_preemptions >= 2
    for request in requests:
        alone = run(engine, [request], arrivals=None)[request.request_id]
        mixed = together[request.request_id]
        assert ids_of(mixed) == ids_of(alone), request
        assert mixed[-1].finish_reason == alone[-1].finish_reason
        for one, other in zip(mixed, alone, strict=True):
            if request.params.logprobs is not None:
                assert one.logprobs is not None and other.logprobs is not None
                assert one.logprobs[0].token == pytest.approx(other.logprobs[0].token, abs=1e-3)
                assert len(one.logprobs[0].top) == 3
    small.close()


def test_prompts_are_cut_as_the_delta_rule_computes_them():
    assert plan.CHUNK == delta_rule.CHUNK


def test_aborts_end_their_request_and_nothing_else(engine):
    requests = [random_request(f"a{number}", number) for number in range(12)]
    alone = {
        request.request_id: ids_of(run(engine, [request], arrivals=None)[request.request_id])
        for request in requests
    }
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for request in requests:
        engine.submit(request)
    steps = 0
    aborted = [f"a{number}" for number in (0, 3, 4, 11)]
    while engine.has_work():
        if steps < len(aborted):
            engine.abort(aborted[steps])
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
        steps += 1
    for name, ids in alone.items():
        got = ids_of(outputs[name])
        assert outputs[name][-1].finish_reason is not None
        if name in aborted and outputs[name][-1].finish_reason == "abort":
            assert got == ids[: len(got)]
        else:
            assert got == ids


def test_prompt_logprobs_come_once_whatever_the_pieces(engine):
    prompt = tuple(np.random.default_rng(0).integers(0, VOCABULARY, 200).tolist())
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    others = [random_request(f"o{number}", number) for number in range(5)]
    outputs = run(engine, [Request("p", prompt, params), *others], arrivals=None)["p"]
    found = outputs[0].prompt_logprobs
    assert found is not None and len(found) == 200 and found[0] is None
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    entries = [entry for entry in found[1:] if entry is not None]
    assert len(entries) == 199
    assert all(len(entry.top) == 2 and entry.token <= entry.top[0][1] + 1e-6 for entry in entries)


def test_requests_that_can_never_run_are_refused_by_name(engine):
    for params, param in (
        (SamplingParams(logit_bias={VOCABULARY: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[VOCABULARY]), "stop_token_ids"),
        (SamplingParams(min_tokens=60, max_tokens=100), "min_tokens"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(Request("x", (1,) * 200, params))
        assert caught.value.param == param
    assert not engine.has_work()


def test_a_device_failure_ends_what_runs_and_the_engine_goes_on(engine, monkeypatch):
    request = random_request("d", 1)
    alone = ids_of(run(engine, [request], arrivals=None)["d"])
    engine.submit(request)
    engine.submit(random_request("e", 2))
    engine.step()

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "dispatch", fail)
        ended = engine.step()
    assert {output.request_id for output in ended} == {"d", "e"}
    for output in ended:
        assert output.error == "the device failed: RESOURCE_EXHAUSTED: out of memory"
    engine.scheduler.check_invariants()
    assert not engine.has_work()
    assert ids_of(run(engine, [request], arrivals=None)["d"]) == alone


@pytest.mark.parametrize("place", ["dispatch", "collect"])
def test_an_interrupt_ends_what_runs_and_is_raised(engine, monkeypatch, place: str):
    request = random_request("i", 1)
    alone = ids_of(run(engine, [request], arrivals=None)["i"])
    engine.submit(request)
    engine.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    (output,) = engine.step()
    assert (output.request_id, output.error) == ("i", "a step was interrupted")
    assert ids_of(run(engine, [request], arrivals=None)["i"]) == alone


def test_rows_that_are_not_finite_end_alone(engine):
    requests = [random_request(f"n{number}", number) for number in range(4)]
    alone = {
        one.request_id: ids_of(run(engine, [one], arrivals=None)[one.request_id])
        for one in requests
    }
    for one in requests:
        engine.submit(one)
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for output in engine.step():
        outputs[output.request_id].append(output)
    poisoned = requests[1].request_id
    poison(engine, engine._live[poisoned].sequence.slot)
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for name, ids in alone.items():
        if name == poisoned:
            assert outputs[name][-1].error == "the model's logits are not finite numbers"
        else:
            assert ids_of(outputs[name]) == ids
    # Its slot and pages serve the next one as if nothing had been.
    again = run(engine, requests, arrivals=None)
    assert {name: ids_of(found) for name, found in again.items()} == alone


def poison(engine: ContinuousBatchingEngine, slot: int) -> None:
    """Write NaN into one sequence's recurrent state, as a broken kernel would."""
    state = engine.runner._state
    layers = tuple(
        replace(layer, recurrent=layer.recurrent.at[slot].set(jnp.nan))
        if isinstance(layer, StateSlots)
        else layer
        for layer in state.pools.layers
    )
    engine.runner._state = replace(state, pools=CachePools(layers))
