"""Recurrent state, convolution window and pages under an engine: used again, padded, cut, lost."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.plan import CHUNK
from qwen35_jax.engine.request import Request
from qwen35_jax.model.cache import DeltaNetState, init_state
from qwen35_jax.model.delta_net import GatedDeltaNet
from qwen35_jax.model.paged import StateSlots, StepBatch, init_pools, slot_delta_net
from qwen35_jax.model.transformer import prefill
from qwen35_jax.sampling_params import MAX_LOGPROBS
from tests.support.engines import (
    Outputs,
    ids_of,
    log_softmax,
    request,
    run,
    small_loaded,
    small_reference,
    small_reopened,
)
from tests.support.mixed_requests import (
    VOCABULARY_SIZE,
    fill_pools,
    pools_of,
    preempt,
    random_prompt,
)
from tests.support.models import COMPILE_FAST, relative_error, tiny_params

# Float32 sums in another order; measured at most 4e-4 on logits of size 10.
TOLERANCE = 1e-3


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return random_prompt(random.Random(seed), length)


def sampled(name: str, length: int, *, max_tokens: int = 40) -> Request:
    return request(
        name, prompt_of(length), temperature=1.0, seed=7, max_tokens=max_tokens, logprobs=20
    )


def logprobs_of(outputs: Outputs, name: str) -> np.ndarray:
    """[generated, 20], best first."""
    entries = [entry for output in outputs[name] for entry in output.logprobs or ()]
    return np.array([[value for _, value in entry.top] for entry in entries])


def delta_pools(engine: ContinuousBatchingEngine) -> list[StateSlots]:
    layers = engine.runner._state.pools.layers
    return [layer for layer in layers if isinstance(layer, StateSlots)]


def slot_of(engine: ContinuousBatchingEngine, name: str) -> int:
    slot = engine._live[name].sequence.slot
    assert slot is not None
    return slot


@pytest.mark.parametrize("length", [1, 2, 3, 64, 100])
def test_a_slot_that_is_used_again_is_as_a_fresh_one(length: int):
    second = sampled("b", length)
    fresh = run(small_reopened(max_num_seqs=1), second)
    used = small_reopened(max_num_seqs=1)
    run(used, sampled("a", 150))
    again = run(used, second)
    assert ids_of(again["b"]) == ids_of(fresh["b"])
    np.testing.assert_array_equal(logprobs_of(again, "b"), logprobs_of(fresh, "b"))


def test_nothing_is_read_that_a_sequence_has_not_written():
    requests = [sampled(f"r{length}", length) for length in (1, 2, 3, 64, 150)]
    expected = run(small_reopened(), *requests)
    engine = small_reopened()
    fill_pools(engine, np.nan)
    got = run(engine, *requests)
    for one in requests:
        assert ids_of(got[one.request_id]) == ids_of(expected[one.request_id])


@pytest.mark.parametrize("concurrency", range(2, 10))
def test_any_number_beside_each_other_get_what_one_alone_gets(concurrency: int):
    alone = run(small_reopened(), sampled("r", 70))
    engine = small_reopened()
    outputs = run(engine, *(sampled(f"r{number}", 70) for number in range(concurrency)))
    assert len(outputs) == concurrency
    for name in outputs:
        assert ids_of(outputs[name]) == ids_of(alone["r"])
        np.testing.assert_allclose(
            logprobs_of(outputs, name), logprobs_of(alone, "r"), atol=TOLERANCE
        )


@pytest.mark.parametrize("concurrency", [1, 2, 5, 8])
def test_padding_rows_leave_idle_slots_as_they_are(concurrency: int):
    engine = small_reopened()
    fill_pools(engine, np.nan)
    for number in range(concurrency):
        engine.submit(sampled(f"r{number}", 5))
    for _ in range(20):
        engine.step()
    used = {slot_of(engine, f"r{number}") for number in range(concurrency)}
    for layer in delta_pools(engine):
        for array in (layer.recurrent, layer.window):
            values = np.asarray(array).reshape(len(array), -1)
            assert set(np.flatnonzero(~np.isnan(values).all(axis=1))) == used
            assert np.isfinite(values[sorted(used)]).all()


@pytest.mark.parametrize("budget", [1, 2, 3, 63, 64, 65, 256, 317])
def test_a_prompt_in_pieces_of_any_size_is_the_same_prompt(budget: int):
    prompt = list(prompt_of(310))
    engine = small_reopened(max_num_seqs=1, max_num_batched_tokens=budget)
    (output,) = run(engine, request("r", tuple(prompt), max_tokens=1, logprobs=20))["r"]
    # A piece that does not end the prompt fills its chunks, where it can.
    piece = 310 if budget >= 310 else budget // CHUNK * CHUNK or budget
    assert engine.stats().steps == -(-310 // piece)
    expected = log_softmax(small_reference()(prompt)[-1])
    assert output.logprobs is not None
    (entry,) = output.logprobs
    top = dict(entry.top)
    assert set(top) == set(np.argsort(-expected[:VOCABULARY_SIZE])[:MAX_LOGPROBS].tolist())
    np.testing.assert_allclose(list(top.values()), expected[list(top)], atol=TOLERANCE)


@pytest.mark.parametrize("generated", [1, 8, 31, 127])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(generated: int):
    requests = [sampled("first", 30, max_tokens=150), sampled("last", 70, max_tokens=140)]
    whole = run(small_reopened(), *requests)
    engine = small_reopened()
    for one in requests:
        engine.submit(one)
    outputs: Outputs = {"first": [], "last": []}
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
        live = engine._live.get("last")
        if live is not None and live.sequence.num_sampled == generated:
            preempt(engine, "last")
            assert len(live.sequence.generated) == generated
            assert engine.scheduler.num_free_slots == 8
        engine.scheduler.check_invariants()
    stats = engine.stats()
    assert (stats.preemptions, stats.generation_tokens) == (1, 290)
    assert stats.prompt_tokens == 30 + 70 + 70 + generated
    for one in requests:
        assert ids_of(outputs[one.request_id]) == ids_of(whole[one.request_id])


def test_two_thousand_greedy_tokens_are_the_references_and_so_is_the_state_after_them():
    prompt = list(prompt_of(40))
    engine = small_reopened()
    # The model is random: without a penalty it says one token for ever.
    engine.submit(request("r", tuple(prompt), max_tokens=2001, frequency_penalty=1.0))
    slot = 0
    ids: list[int] = []
    while engine.has_work():
        for output in engine.step():
            ids += output.token_ids
        slot = slot_of(engine, "r") if "r" in engine._live else slot
    assert len(ids) == 2001 and len(set(ids)) > 200

    # Its last token is never fed back.
    seen = prompt + ids[:-1]
    logits = small_reference()(seen)[len(prompt) - 1 :, :VOCABULARY_SIZE]
    counts = np.zeros(VOCABULARY_SIZE)
    for token_id, row in zip(ids, logits, strict=True):
        penalised = row - counts
        assert penalised[token_id] >= penalised.max() - TOLERANCE
        counts[token_id] += 1

    params = small_loaded().params
    state = init_state(params.config, 1, 2304)
    _, state = jax.jit(prefill, compiler_options=COMPILE_FAST)(params, jnp.array([seen]), state)
    expected = [layer for layer in state.layers if isinstance(layer, DeltaNetState)]
    for pool, layer in zip(delta_pools(engine), expected, strict=True):
        assert pool.recurrent.dtype == jnp.float32
        assert relative_error(pool.recurrent[slot], np.asarray(layer.recurrent[0])) < TOLERANCE


def test_a_bfloat16_models_state_is_float32_and_stays_near_its_reference_for_2000_steps():
    params = tiny_params("ratio2_tied", dtype="bfloat16", layers=1)
    exact = tiny_params("ratio2_tied", layers=1)
    inputs = 0.3 * np.random.default_rng(0).standard_normal((2000, params.config.hidden_size))
    inputs = inputs.astype(jnp.bfloat16)

    def states(mixer: GatedDeltaNet, dtype: jnp.dtype) -> StateSlots:
        pools = init_pools(mixer.config, num_pages=2, page_size=16, num_slots=2)
        (pool,) = pools.layers
        assert isinstance(pool, StateSlots)
        none = jnp.zeros((0,), jnp.int32)
        batch = StepBatch(
            tables=jnp.zeros((2, 1), jnp.int32),
            row_slots=jnp.ones((1,), jnp.int32),
            row_positions=jnp.zeros((1,), jnp.int32),
            chunk_slots=none,
            chunk_starts=none,
            chunk_lengths=none,
            first=none != 0,
            last=none != 0,
        )

        def one(pool: StateSlots, x: jax.Array) -> tuple[StateSlots, None]:
            return slot_delta_net(mixer, x[None].astype(dtype), pool, batch)[1], None

        return jax.jit(partial(jax.lax.scan, one), compiler_options=COMPILE_FAST)(pool, inputs)[0]

    mixer, exact_mixer = params.layers[0].mixer, exact.layers[0].mixer
    assert isinstance(mixer, GatedDeltaNet) and isinstance(exact_mixer, GatedDeltaNet)
    got, expected = states(mixer, jnp.bfloat16), states(exact_mixer, jnp.float32)
    assert (got.recurrent.dtype, got.window.dtype) == (jnp.float32, jnp.bfloat16)
    assert relative_error(got.recurrent[1], np.asarray(expected.recurrent[1])) < 1e-2


@pytest.mark.parametrize("what", ["state", "pages"])
def test_numbers_that_are_not_finite_end_their_request_and_no_other(what: str):
    requests = [sampled(f"r{number}", 37 + number) for number in range(4)]
    alone = {one.request_id: ids_of(run(small_reopened(), one)[one.request_id]) for one in requests}
    engine = small_reopened()
    before = pools_of(engine)
    for one in requests:
        engine.submit(one)
    outputs: Outputs = {one.request_id: [] for one in requests}
    for output in [*engine.step(), *engine.step()]:
        outputs[output.request_id].append(output)
    sequence = engine._live["r1"].sequence
    slots, pages = [slot_of(engine, "r1")], list(sequence.pages)
    fill_pools(
        engine,
        np.nan,
        slots=slots if what == "state" else [],
        pages=pages if what == "pages" else [],
    )
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
    last = outputs.pop("r1")[-1]
    assert (last.finish_reason, last.error) == (
        "error",
        "the model's logits are not finite numbers",
    )
    assert {name: ids_of(found) for name, found in outputs.items()} == {
        name: ids for name, ids in alone.items() if name != "r1"
    }
    stats = engine.stats()
    assert (stats.non_finite, stats.finished["error"], stats.device_failures) == (1, 1, 0)
    assert pools_of(engine) == before

    # What it leaves behind is nobody's: the next ones get its slot and its pages.
    seen: set[int] = set()
    again: Outputs = {}
    for one in requests:
        engine.submit(one)
    while engine.has_work():
        for output in engine.step():
            again.setdefault(output.request_id, []).append(output)
        seen.update(slot_of(engine, name) for name in engine._live)
    assert seen >= set(slots)
    assert {name: ids_of(found) for name, found in again.items()} == alone
