"""A sequence's state on the device: reused slots, padding, pieces, preemption, long answers."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.model.paged import CachePools, PagedKV, StateSlots
from qwen35_jax.model.transformer import forward
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import ids_of, reopened, two_layer_params
from tests.support.small_engine import VOCABULARY, make_engine, random_request, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def engine() -> ContinuousBatchingEngine:
    """With a program for each of 1, 2, 4, 8 and 9 rows."""
    return make_engine(two_layer_params(), max_num_seqs=9, few=False)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist())


def with_nan_in_the_padding(engine: ContinuousBatchingEngine) -> None:
    """Slot 0 and page 0, which belong to nobody."""
    state = engine.runner._state
    layers = tuple(
        jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), layer) for layer in state.pools.layers
    )
    engine.runner._state = replace(state, pools=CachePools(layers))


@pytest.mark.parametrize("length", [1, 2, 64, 130])
def test_the_only_slot_gives_the_second_what_a_fresh_one_gives(
    engine: ContinuousBatchingEngine, length: int
):
    first = Request("first", prompt_of(190, seed=1), GREEDY)
    second = Request("second", prompt_of(length), GREEDY)
    fresh = run(reopened(engine, max_num_seqs=1), [second])["second"]
    used = reopened(engine, max_num_seqs=1)
    run(used, [first])
    again = run(used, [second])["second"]
    assert ids_of(again) == ids_of(fresh)
    assert [one.logprobs for one in again] == [one.logprobs for one in fresh]


@pytest.mark.parametrize("count", range(1, 10))
def test_as_many_as_may_run_say_what_one_says_whatever_the_padding_holds(
    engine: ContinuousBatchingEngine, count: int
):
    alone = ids_of(run(reopened(engine), [Request("one", prompt_of(70), GREEDY)])["one"])
    together = reopened(engine)
    with_nan_in_the_padding(together)
    requests = [Request(f"s{number}", prompt_of(70), GREEDY) for number in range(count)]
    outputs = run(together, requests)
    assert [ids_of(outputs[one.request_id]) for one in requests] == [alone] * count


@pytest.mark.parametrize("budget", [10, 63, 64, 65, 128, 200])
def test_a_prompt_in_pieces_gives_the_logprobs_of_the_whole(
    engine: ContinuousBatchingEngine, budget: int
):
    request = Request("p", prompt_of(231), replace(GREEDY, max_tokens=4))
    whole = run(reopened(engine), [request])["p"]
    pieces = reopened(engine, max_num_batched_tokens=budget)
    found = run(pieces, [request])["p"]
    assert pieces.stats().steps > 4
    assert ids_of(found) == ids_of(whole)
    for one, other in zip(found, whole, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        assert [token_id for token_id, _ in one.logprobs[0].top] == [
            token_id for token_id, _ in other.logprobs[0].top
        ]
        np.testing.assert_allclose(
            [value for _, value in one.logprobs[0].top],
            [value for _, value in other.logprobs[0].top],
            atol=1e-4,
        )


@pytest.mark.parametrize("generated", [1, 8, 31, 127])
def test_preempted_after_any_number_of_tokens_the_answer_is_the_same(
    engine: ContinuousBatchingEngine, generated: int
):
    """Penalties, a seed and logprobs among what must survive."""
    params = SamplingParams(
        temperature=1.0,
        seed=7,
        max_tokens=150,
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logprobs=2,
    )
    request = Request("p", prompt_of(66), params)
    whole = run(reopened(engine), [request])["p"]
    interrupted = reopened(engine)
    interrupted.submit(request)
    outputs = []
    while len(ids_of(outputs)) < generated:
        outputs += interrupted.step()
    sequence = interrupted._live["p"].sequence
    # Until nothing of it is in flight, as the scheduler itself waits.
    if interrupted._running is not None:
        collected = interrupted.runner.collect(interrupted._running)
        interrupted._running = None
        interrupted._take(collected)
    interrupted.scheduler._preempt(sequence)
    while interrupted.has_work():
        outputs += interrupted.step()
        interrupted.scheduler.check_invariants()
    assert interrupted.scheduler.num_preemptions == 1
    assert ids_of(outputs) == ids_of(whole)
    assert len(ids_of(outputs)) == 150


def test_two_thousand_greedy_tokens_are_the_whole_forwards():
    params = two_layer_params()
    engine = make_engine(params, max_num_seqs=1, pages=132, max_model_len=2100)
    prompt = prompt_of(5)
    one = replace(GREEDY, max_tokens=2000, logprobs=None)
    ids = ids_of(run(engine, [Request("long", prompt, one)])["long"])
    assert len(ids) == 2000
    row = np.array([*prompt, *ids], np.int32)
    logits = np.asarray(forward(params, jnp.asarray(row[None])))[
        0, len(prompt) - 1 : -1, :VOCABULARY
    ]
    behind = logits.max(-1) - np.take_along_axis(logits, row[len(prompt) :, None], -1)[:, 0]
    assert behind.max() < 1e-3
    # Of the last slot state against the same tokens in one piece: the carried error of 2,000 steps.
    again = make_engine(params, max_num_seqs=1, pages=132, max_model_len=2100)
    run(again, [Request("whole", tuple(row[:-1].tolist()), replace(one, max_tokens=1))])
    for carried, fresh in zip(recurrent_states(engine), recurrent_states(again), strict=True):
        assert np.isfinite(carried).all()
        error = np.linalg.norm(carried - fresh) / np.linalg.norm(fresh)
        assert error < 1e-3


def recurrent_states(engine: ContinuousBatchingEngine) -> list[np.ndarray]:
    """Of the one slot there is."""
    layers = engine.runner._state.pools.layers
    return [np.asarray(layer.recurrent[1]) for layer in layers if isinstance(layer, StateSlots)]


def test_min_tokens_hold_back_every_end(engine: ContinuousBatchingEngine):
    params = SamplingParams(
        temperature=0.0, max_tokens=64, min_tokens=32, logit_bias={5: 50.0}, stop_token_ids=[9]
    )
    (short,) = run(reopened(engine), [Request("s", (1, 2), replace(params, min_tokens=0))]).values()
    assert (len(ids_of(short)), short[-1].finish_reason) == (1, "stop")
    (held,) = run(reopened(engine), [Request("s", (1, 2), params)]).values()
    assert (len(ids_of(held)), held[-1].finish_reason) == (33, "stop")


def test_the_slot_of_a_failed_row_holds_no_trace_of_it(engine: ContinuousBatchingEngine):
    one = reopened(engine, max_num_seqs=1)
    alone = ids_of(run(reopened(engine, max_num_seqs=1), [random_request("n", 4)])["n"])
    one.submit(Request("bad", prompt_of(20), GREEDY))
    one.step()
    state = one.runner._state
    layers = tuple(
        layer
        if isinstance(layer, PagedKV)
        else replace(layer, recurrent=layer.recurrent.at[1].set(jnp.nan))
        for layer in state.pools.layers
    )
    one.runner._state = replace(state, pools=CachePools(layers))
    outputs = run(one, [])
    assert outputs["bad"][-1].error == "the model's logits are not finite numbers"
    assert one.stats().non_finite == 1
    assert ids_of(run(one, [random_request("n", 4)], arrivals=random.Random(0))["n"]) == alone
