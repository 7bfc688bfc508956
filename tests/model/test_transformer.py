"""The whole model's promises: pieces, forks, padding, row order, gradients, compiled form."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.checkpoint import named_parameters
from qwen35_jax.config import Dtype
from qwen35_jax.model import delta_net
from qwen35_jax.model.cache import ModelState, init_state
from qwen35_jax.model.delta_rule import recurrent_delta_rule
from qwen35_jax.model.transformer import (
    Qwen35,
    decode,
    forward,
    hidden_states,
    parameter_bytes,
    parameter_count,
    prefill,
    unembed,
)
from tests.support.models import COMPILE_FAST, forked, relative_error, tiny_config, tiny_params
from tests.support.tiny_models import TINY_CONFIGS, golden_ids

CAPACITY = 134
# Two ways through float32 differ by the order of sums. Measured, relative: 4.2e-5.
TOLERANCE = 5e-4

fast_jit = partial(jax.jit, compiler_options=COMPILE_FAST)
jit_prefill = fast_jit(prefill)
jit_forward = fast_jit(forward)
jit_hidden = fast_jit(hidden_states)


@pytest.fixture(scope="module")
def params() -> Qwen35:
    """One attention layer, then two delta layers; params."""
    return _model()


def _model(dtype: Dtype = "float32") -> Qwen35:
    return tiny_params("ratio3_untied", dtype=dtype, layers=3)


def prompts(batch: int, length: int) -> np.ndarray:
    """Different prompts, [batch, length] int32."""
    ids = golden_ids(TINY_CONFIGS["ratio3_untied"], 1024).astype(np.int32)
    return np.stack([np.roll(ids, 17 * row)[:length] for row in range(batch)])


def assert_states_equal(actual: ModelState, expected: ModelState, tolerance: float) -> None:
    np.testing.assert_array_equal(actual.position, expected.position)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(one, np.asarray(other)) <= tolerance


@given(
    segments=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 63, 64, 65]), st.booleans()), min_size=1, max_size=8
    )
)
@settings(max_examples=25)
def test_any_segmentation_equals_the_whole_prompt(
    params: Qwen35, segments: list[tuple[int, bool]]
) -> None:
    ids = prompts(1, CAPACITY)
    fresh = init_state(params.config, 1, CAPACITY)
    whole, _ = jit_hidden(params, ids, fresh, lengths=jnp.array([CAPACITY]))
    whole_logits = unembed(params, whole[0])
    state = fresh
    end = 0
    for length, padded in segments:
        if end + length > CAPACITY:
            break
        piece, lengths = ids[:, end : end + length], None
        if padded:
            piece = np.pad(piece, ((0, 0), (0, 65 - length)))
            lengths = jnp.array([length])
        logits, state = jit_prefill(params, piece, state, lengths=lengths)
        end += length
        assert relative_error(logits[0], np.asarray(whole_logits[end - 1])) <= TOLERANCE
    _, whole_state = jit_hidden(params, ids, fresh, lengths=jnp.array([end]))
    assert_states_equal(state, whole_state, TOLERANCE)


def test_forked_state_goes_on_like_a_cold_run(params: Qwen35) -> None:
    ids = prompts(3, 65)
    ids[:, :40] = ids[0, :40]
    _, trunk = jit_prefill(params, ids[:1, :40], init_state(params.config, 1, 65), lengths=None)
    kept = jax.tree.map(np.array, trunk)
    logits, _ = jit_prefill(params, ids[:, 40:], forked(trunk, [0, 0, 0]), lengths=None)
    cold = jit_forward(params, ids)[:, -1]
    assert relative_error(logits, np.asarray(cold)) <= TOLERANCE
    for leaf, before in zip(jax.tree.leaves(trunk), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(leaf, before)


def test_nan_in_the_padding_reaches_nothing(params: Qwen35) -> None:
    """Padding ids whose embedding is NaN, in a first piece and in a resumed one."""
    padding_id, width = params.config.vocab_size - 1, 70
    embed = params.embed[...].at[padding_id].set(jnp.nan)
    poisoned = jax.tree.map(lambda leaf: leaf, params)
    poisoned.embed[...] = embed
    lengths = np.array([1, 2, 3, 64, 70])
    ids = prompts(len(lengths), 2 * width) % padding_id
    is_padding = np.arange(width) >= lengths[:, None]
    first, second = ids[:, :width], ids[:, width:]
    state = init_state(params.config, len(lengths), 2 * width)
    clean_state = state
    for piece in (first, second):
        padded = np.where(is_padding, padding_id, piece)
        hidden, _ = jit_hidden(poisoned, padded, state, lengths=lengths)
        assert np.isnan(hidden[is_padding]).all()
        logits, state = jit_prefill(poisoned, padded, state, lengths=lengths)
        clean_logits, clean_state = jit_prefill(params, piece, clean_state, lengths=lengths)
        np.testing.assert_array_equal(logits, clean_logits)
    for leaf, clean_leaf in zip(jax.tree.leaves(state), jax.tree.leaves(clean_state), strict=True):
        np.testing.assert_array_equal(leaf, clean_leaf)


def test_padded_row_equals_the_prompt_alone(params: Qwen35) -> None:
    ids = prompts(2, 70)
    state = init_state(params.config, 2, 71)
    logits, state = jit_prefill(params, ids, state, lengths=jnp.array([3, 70]))
    alone, alone_state = jit_prefill(
        params, ids[:1, :3], init_state(params.config, 1, 71), lengths=None
    )
    assert relative_error(logits[:1], np.asarray(alone)) <= TOLERANCE
    assert_states_equal(forked(state, [0]), alone_state, TOLERANCE)


def test_permuted_rows_give_permuted_outputs(params: Qwen35) -> None:
    ids, lengths, order = prompts(4, 70), np.array([70, 9, 64, 2]), [2, 0, 3, 1]
    state = init_state(params.config, 4, 71)
    logits, after = jit_prefill(params, ids, state, lengths=lengths)
    moved_logits, moved = jit_prefill(params, ids[order], state, lengths=lengths[order])
    assert relative_error(moved_logits, np.asarray(logits)[order]) <= 1e-5
    assert_states_equal(moved, forked(after, order), 1e-5)


def test_nan_state_of_one_row_stays_in_its_row(params: Qwen35) -> None:
    ids = prompts(3, 11)
    state = init_state(params.config, 3, 12)
    _, state = jit_prefill(params, ids[:, :10], state, lengths=None)
    poisoned = jax.tree.map(
        lambda leaf: leaf.at[1].set(jnp.nan) if leaf.dtype == jnp.float32 else leaf, state
    )
    expected, _ = jit_prefill(params, ids[:, 10:], state, lengths=None)
    logits, _ = jit_prefill(params, ids[:, 10:], poisoned, lengths=None)
    assert np.isnan(logits[1]).all()
    np.testing.assert_array_equal(logits[np.array([0, 2])], expected[np.array([0, 2])])


def test_one_prompt_in_every_row_gives_equal_logits(params: Qwen35) -> None:
    ids = np.repeat(prompts(1, 66), 8, axis=0)
    logits, state = jit_prefill(params, ids[:, :65], init_state(params.config, 8, 66), lengths=None)
    stepped, _ = jit_prefill(params, ids[:, 65:], state, lengths=None)
    for rows in (logits, stepped):
        np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))


def test_decode_is_a_prefill_of_one_token(params: Qwen35) -> None:
    ids = prompts(2, 4)
    state = init_state(params.config, 2, 4)
    _, state = jit_prefill(params, ids[:, :3], state, lengths=None)
    logits, after = fast_jit(decode)(params, ids[:, 3], state)
    expected, expected_state = jit_prefill(params, ids[:, 3:], state, lengths=None)
    np.testing.assert_array_equal(logits, expected)
    assert_states_equal(after, expected_state, 0.0)
    np.testing.assert_array_equal(after.position, [4, 4])


def _loss(params: Qwen35, ids: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(forward(params, ids[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, ids[:, 1:, None], axis=-1))


jit_gradients = fast_jit(jax.grad(_loss))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_reaches_every_parameter(dtype: Dtype) -> None:
    params = _model(dtype)
    gradients = jit_gradients(params, jnp.asarray(prompts(2, 67)))
    parameters = dict(named_parameters(params))
    assert dict(named_parameters(gradients)).keys() == parameters.keys()
    for path, gradient in named_parameters(gradients):
        assert gradient.shape == parameters[path].shape
        assert gradient.dtype == parameters[path].dtype
        assert np.isfinite(np.asarray(gradient, np.float32)).all(), path
        assert np.any(np.asarray(gradient, np.float32)), path


def test_gradient_equals_the_token_by_token_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    params, ids = _model(), jnp.asarray(prompts(2, 67))
    gradients = jit_gradients(params, ids)
    monkeypatch.setattr(delta_net, "delta_rule", recurrent_delta_rule)
    # Another function object: jit would otherwise give the program it has.
    expected = fast_jit(jax.grad(lambda params, ids: _loss(params, ids)))(params, ids)
    for (path, gradient), (_, want) in zip(
        named_parameters(gradients), named_parameters(expected), strict=True
    ):
        # Measured: 5.5e-5.
        assert relative_error(gradient, np.asarray(want)) <= 1e-3, path


def _constant_bytes(hlo: str) -> list[int]:
    """Sizes of the constants in a compiled program's text."""
    sizes = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* constant\(", hlo)
    return [
        sizes.get(dtype, 8) * int(np.prod([int(axis) for axis in shape.split(",") if axis]))
        for dtype, shape in found
    ]


def _big_model() -> Qwen35:
    """Two tiny layers under an embedding of 2 MB."""
    config = tiny_config("ratio2_tied").replace(
        vocab_size=8192, layer_types=("linear_attention", "full_attention")
    )
    # Not one value everywhere, which compiles to a broadcast and not to a constant.
    stream = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(stream.standard_normal(leaf.shape), leaf.dtype), Qwen35(config)
    )


def test_decode_program_holds_no_weights_and_aliases_its_state() -> None:
    params = _big_model()
    state = init_state(params.config, 2, 16)
    token = jnp.zeros((2,), jnp.int32)
    step = jax.jit(decode, donate_argnames="state", compiler_options=COMPILE_FAST)
    hlo = step.lower(params, token, state).compile().as_text()
    assert hlo is not None
    assert max(_constant_bytes(hlo), default=0) < 1_000_000
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo)
    assert aliases is not None
    assert aliases.group(1).count("alias)") == len(jax.tree.leaves(state))
    # A donation that can't be used is a warning, and so an error here.
    _, after = step(params, token, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, after)))


def test_constants_of_a_closure_are_seen() -> None:
    params = _big_model()
    state = init_state(params.config, 2, 16)
    closed = jax.jit(lambda token, state: decode(params, token, state)[0].sum(-1))
    hlo = closed.lower(jnp.zeros((2,), jnp.int32), state).compile().as_text()
    assert hlo is not None
    assert max(_constant_bytes(hlo)) >= 2_000_000


def test_sizes_count_every_parameter(params: Qwen35) -> None:
    arrays = [leaf for _, leaf in named_parameters(params)]
    assert parameter_count(params) == sum(np.asarray(array).size for array in arrays)
    assert parameter_bytes(params) == sum(np.asarray(array).nbytes for array in arrays)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(5, np.int32), r"ids must be \[batch, length\] integers, not \(5,\)"),
        (np.zeros((1, 5), np.float32), r"ids must be \[batch, length\] integers, .* float32"),
        (np.zeros((2, 5), np.int32), "ids have 2 rows, the state has 1"),
        (np.zeros((1, 9), np.int32), "9 tokens don't fit a state of capacity 8"),
    ],
)
def test_ids_that_do_not_fit_are_refused(params: Qwen35, ids: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(params, jnp.asarray(ids), init_state(params.config, 1, 8))
