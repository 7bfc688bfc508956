"""The jitted programs: what they compute, donate and take as arguments."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.model.cache import ModelState, init_state
from qwen35_jax.model.transformer import decode, prefill
from qwen35_jax.sampling_arrays import SamplingArrays
from qwen35_jax.step import Step
from tests.support.engines import fast_compilation, shared_step, two_layer_params
from tests.support.models import COMPILE_FAST

VOCABULARY_SIZE = 77
ROWS = 2
PIECE = 16
CAPACITY = 256


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture(scope="module")
def step() -> Step:
    return shared_step(two_layer_params(), VOCABULARY_SIZE)


def fresh_state() -> ModelState:
    return init_state(two_layer_params().config, ROWS, CAPACITY)


def no_logits() -> jax.Array:
    return jnp.zeros((ROWS, two_layer_params().config.vocab_size), jnp.float32)


def greedy_options() -> SamplingArrays:
    return SamplingArrays.greedy(ROWS)


def some_ids() -> jax.Array:
    return jnp.arange(ROWS * PIECE, dtype=jnp.int32).reshape(ROWS, PIECE)


def test_prefill_is_the_models(step: Step):
    lengths = jnp.array([PIECE, 3])
    expected, expected_state = jax.jit(prefill, compiler_options=COMPILE_FAST)(
        two_layer_params(), some_ids(), fresh_state(), lengths=lengths
    )
    state, logits = step.prefill(fresh_state(), no_logits(), some_ids(), lengths)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_array_equal(state.position, expected_state.position)


def test_a_row_without_tokens_keeps_its_logits_and_state(step: Step):
    both = jnp.array([PIECE, 5])
    state, logits = step.prefill(fresh_state(), no_logits(), some_ids(), both)
    before = jax.device_get((state, logits))
    state, logits = step.prefill(state, logits, some_ids(), jnp.array([4, 0]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves((state, logits)), strict=True):
        np.testing.assert_array_equal(new[1], old[1])
    assert not np.array_equal(logits[0], before[1][0])


def test_decode_is_the_models_and_then_the_sampler(step: Step):
    state, _ = step.prefill(fresh_state(), no_logits(), some_ids(), jnp.array([PIECE, 3]))
    tokens = jnp.array([7, 9])
    logits, _ = jax.jit(decode, compiler_options=COMPILE_FAST)(two_layer_params(), tokens, state)
    _, sampled = step.decode(state, tokens, greedy_options())
    np.testing.assert_array_equal(sampled.tokens, logits[:, :VOCABULARY_SIZE].argmax(-1))


def test_ids_beyond_the_vocabulary_are_masked_in_both_programs():
    # Every id but the first is beyond this vocabulary.
    step = Step(two_layer_params(), 1)
    logits = no_logits().at[:, 5].set(9.0)
    assert list(step.sample(logits, greedy_options()).tokens) == [0, 0]
    _, sampled = step.decode(fresh_state(), jnp.array([7, 9]), greedy_options())
    assert list(sampled.tokens) == [0, 0]


def test_state_and_logits_are_donated_and_options_are_not(step: Step):
    state, logits, options = fresh_state(), no_logits(), greedy_options()
    new_state, new_logits = step.prefill(state, logits, some_ids(), jnp.array([2, 2]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, logits)))
    tokens = step.sample(new_logits, options).tokens
    step.decode(new_state, tokens, options)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(new_state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new_logits, tokens, options)))


def test_a_donated_caches_memory_is_used_again(step: Step):
    state, _ = step.prefill(fresh_state(), no_logits(), some_ids(), jnp.array([2, 2]))
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.layers)]
    state, _ = step.decode(state, jnp.array([1, 2]), greedy_options())
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.layers)]
    assert sorted(after) == sorted(addresses)


def test_parameters_are_arguments_and_not_constants(step: Step):
    leaves = jax.tree.leaves(two_layer_params())
    lowered = step._decode.lower(
        step._leaves,
        state=fresh_state(),
        tokens=jnp.array([1, 2]),
        options=greedy_options(),
    )
    text = lowered.as_text()
    inputs = text[text.index("@main(") : text.index(") ->")].count("%arg")
    others = len(jax.tree.leaves((fresh_state(), greedy_options()))) + 1
    assert inputs == len(leaves) + others
    # A constant is spelled out in hexadecimal on one line; the smallest matrix would take 10 kB.
    assert max(map(len, text.splitlines())) < 5_000


def test_a_shape_compiles_once(step: Step):
    def round_trip() -> list[int]:
        state, logits = step.prefill(fresh_state(), no_logits(), some_ids(), jnp.array([2, 2]))
        sampled = step.sample(logits, greedy_options())
        for _ in range(2):
            state, sampled = step.decode(state, sampled.tokens, greedy_options())
        programs: list[Any] = [step._prefill, step._sample, step._decode]
        return [program._cache_size() for program in programs]

    assert round_trip() == round_trip()
