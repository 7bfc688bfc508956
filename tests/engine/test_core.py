"""Continuous batching: whatever runs beside a request, it gets what it gets alone."""

import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.engine import plan
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.model import delta_rule
from qwen35_jax.model.paged import CachePools, StateSlots
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import ids_of, two_layer_params
from tests.support.small_engine import PAGE, VOCABULARY, make_engine, random_request, run


@pytest.fixture(scope="module")
def params():
    return two_layer_params()


@pytest.fixture(scope="module")
def engine(params):
    return make_engine(params)


def test_two_hundred_requests_together_get_what_each_gets_alone(params, engine):
    requests = [random_request(f"r{number}", number) for number in range(200)]
    # A pool a little over what the largest needs, so that sequences are preempted.
    largest = max(len(one.prompt_token_ids) + (one.params.max_tokens or 0) for one in requests)
    small = make_engine(params, pages=math.ceil(1.2 * largest / PAGE))
    free = small.scheduler.num_free_pages, small.scheduler.num_free_slots
    chance = random.Random(0)
    aborted = {one.request_id for one in requests if chance.random() < 0.15}
    together = run(small, requests, arrivals=chance, aborted=aborted)
    assert small.scheduler.num_preemptions >= 20
    assert (small.scheduler.num_free_pages, small.scheduler.num_free_slots) == free
    reasons = Counter(outputs[-1].finish_reason for outputs in together.values())
    assert min(reasons[reason] for reason in ("stop", "length", "abort")) >= 10, reasons
    for request in requests:
        alone = run(engine, [request])[request.request_id]
        mixed = together[request.request_id]
        if mixed[-1].finish_reason == "abort":
            assert ids_of(mixed) == ids_of(alone)[: len(ids_of(mixed))], request
            continue
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
        request.request_id: ids_of(run(engine, [request])[request.request_id])
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
    outputs = run(engine, [Request("p", prompt, params), *others])["p"]
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
    alone = ids_of(run(engine, [request])["d"])
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
    assert ids_of(run(engine, [request])["d"]) == alone


@pytest.mark.parametrize("place", ["dispatch", "collect"])
def test_an_interrupt_ends_what_runs_and_is_raised(engine, monkeypatch, place: str):
    request = random_request("i", 1)
    alone = ids_of(run(engine, [request])["i"])
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
    assert ids_of(run(engine, [request])["i"]) == alone


def test_rows_that_are_not_finite_end_alone(engine):
    requests = [random_request(f"n{number}", number) for number in range(4)]
    alone = {one.request_id: ids_of(run(engine, [one])[one.request_id]) for one in requests}
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
    again = run(engine, requests)
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
