"""Gated DeltaNet: the convolution and its window, key lengths, head sharing, the gated norm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import delta_net
from qwen35_jax.model.cache import DeltaNetState
from qwen35_jax.model.decoder_layer import DecoderLayer
from qwen35_jax.model.delta_net import GatedDeltaNet, causal_conv, l2_norm
from tests.support.models import (
    COMPILE_FAST,
    layer_state,
    relative_error,
    run_mixer,
    tiny_config,
    tiny_params,
)

# Two key heads of 16, four value heads of 24: each key head serves two neighbours.
NAME = "ratio2_tied"

jit_mixer = jax.jit(run_mixer, compiler_options=COMPILE_FAST)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return tiny_config(NAME)


@pytest.fixture(scope="module")
def layer() -> DecoderLayer:
    layer = tiny_params(NAME).layers[0]
    assert isinstance(layer.mixer, GatedDeltaNet)
    return layer


@pytest.fixture(scope="module")
def fresh(config: ModelConfig) -> DeltaNetState:
    state = layer_state(config, "linear_attention", batch=1, capacity=1)
    assert isinstance(state, DeltaNetState)
    return state


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_last_tap_meets_the_current_token(config: ModelConfig) -> None:
    channels = 5
    x, weight = _normal(1, 6, channels), _normal(channels, 4, seed=1)
    window = _normal(1, 3, channels, seed=2)
    out, _ = causal_conv(jnp.asarray(x), jnp.asarray(window), jnp.asarray(weight), None, config)
    inputs = np.concatenate([window, x], axis=1)[0].astype(np.float64)
    convolved = [
        np.sum([weight[:, tap] * inputs[token + tap] for tap in range(4)], axis=0)
        for token in range(6)
    ]
    assert relative_error(out[0], _silu(np.stack(convolved))) <= 1e-6


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_window_shifts_by_the_tokens_seen(length: int, config: ModelConfig) -> None:
    """The next window is the last three of window and tokens, however few the tokens are."""
    window, x = jnp.array([[[1.0], [2.0], [3.0]]]), 4.0 + jnp.arange(length)[None, :, None]
    _, after = causal_conv(x, window, jnp.ones((1, 4)), None, config)
    seen = [1.0, 2.0, 3.0, *(4.0 + np.arange(length))]
    np.testing.assert_array_equal(after[0, :, 0], seen[-3:])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_window_of_a_padded_row_ends_at_its_last_token(length: int, config: ModelConfig) -> None:
    window = jnp.array([[[1.0], [2.0], [3.0]]])
    tokens = jnp.where(jnp.arange(6) < length, 4.0 + jnp.arange(6), jnp.nan)[None, :, None]
    _, after = causal_conv(tokens, window, jnp.ones((1, 4)), jnp.array([length]), config)
    seen = [1.0, 2.0, 3.0, *(4.0 + np.arange(length))]
    np.testing.assert_array_equal(after[0, :, 0], seen[-3:])


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_resuming_with_few_tokens_equals_the_whole(
    piece: int, layer: DecoderLayer, fresh: DeltaNetState
) -> None:
    x = jnp.asarray(_normal(1, 12, layer.config.hidden_size))
    whole, whole_state = jit_mixer(layer, x, fresh)
    outputs, state = [], fresh
    for start in range(0, 12, piece):
        out, state = jit_mixer(layer, x[:, start : start + piece], state)
        outputs.append(out)
    assert relative_error(jnp.concatenate(outputs, axis=1), np.asarray(whole)) <= 1e-5
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(whole_state), strict=True):
        assert relative_error(one, np.asarray(other)) <= 1e-5


def _rule_inputs(
    layer: DecoderLayer, x: np.ndarray, state: DeltaNetState, monkeypatch: pytest.MonkeyPatch
) -> list[np.ndarray]:
    """q, k, v, g, beta as the mixer hands them to the delta rule."""
    seen: list[jax.Array] = []
    rule: Callable[..., tuple[jax.Array, jax.Array]] = delta_net.delta_rule

    def spy(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen.extend(inputs)
        return rule(*inputs)

    monkeypatch.setattr(delta_net, "delta_rule", spy)
    run_mixer(layer, jnp.asarray(x), state)
    return [np.asarray(array) for array in seen[:5]]


def test_key_heads_have_length_one_and_repeat_for_their_value_heads(
    layer: DecoderLayer,
    config: ModelConfig,
    fresh: DeltaNetState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v, g, beta = _rule_inputs(layer, _normal(1, 7, config.hidden_size), fresh, monkeypatch)
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    assert k.shape == (1, 7, heads, key_dim)
    assert v.shape == (1, 7, heads, config.linear_value_head_dim)
    # Epsilon in the root takes a little off short heads.
    np.testing.assert_allclose(np.linalg.norm(k, axis=-1), 1.0, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), key_dim**-0.5, atol=1e-3)
    for shared in (q, k):
        np.testing.assert_array_equal(shared[:, :, 0], shared[:, :, 1])
        np.testing.assert_array_equal(shared[:, :, 2], shared[:, :, 3])
        assert np.all(shared[:, :, 1] != shared[:, :, 2])
    assert np.all(g < 0) and np.all((beta > 0) & (beta < 1))


def test_l2_norm_adds_epsilon_to_the_sum_of_squares() -> None:
    x = np.full((1, 4), 5e-4, np.float32)
    # The sum of squares is 1e-6, as large as epsilon; their mean would be a quarter of it.
    np.testing.assert_allclose(np.linalg.norm(l2_norm(jnp.asarray(x))), 0.5**0.5, rtol=1e-5)
    np.testing.assert_array_equal(l2_norm(jnp.zeros((2, 4))), np.zeros((2, 4)))


def test_decay_and_write_strength_follow_their_formulas(
    layer: DecoderLayer,
    config: ModelConfig,
    fresh: DeltaNetState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixer = layer.mixer
    assert isinstance(mixer, GatedDeltaNet)
    x = _normal(1, 3, config.hidden_size)
    *_, g, beta = _rule_inputs(layer, x, fresh, monkeypatch)
    heads = config.linear_num_value_heads
    projected = x.astype(np.float64) @ np.asarray(mixer.into[...], np.float64)
    b, a = projected[..., -2 * heads : -heads], projected[..., -heads:]
    a_log, dt_bias = (np.asarray(w[...], np.float64) for w in (mixer.a_log, mixer.dt_bias))
    assert relative_error(beta, 1 / (1 + np.exp(-b))) <= 1e-5
    assert relative_error(g, -np.exp(a_log) * np.log1p(np.exp(a + dt_bias))) <= 1e-5


def test_gated_norm_weight_is_plain_and_its_gate_comes_after(
    layer: DecoderLayer, config: ModelConfig
) -> None:
    mixer = layer.mixer
    assert isinstance(mixer, GatedDeltaNet)
    shape = (1, 3, config.linear_num_value_heads, config.linear_value_head_dim)
    out, z = _normal(*shape), _normal(*shape, seed=1)
    wide = out.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    expected = normed * np.asarray(mixer.norm[...], np.float64) * _silu(z)
    actual = mixer._gated_norm(jnp.asarray(out), jnp.asarray(z))
    assert relative_error(actual, expected) <= 1e-5


def test_permuted_value_heads_change_the_output(
    layer: DecoderLayer, config: ModelConfig, fresh: DeltaNetState
) -> None:
    """Head order matters: moved alone the output changes, moved with W_o it doesn't."""
    mixer = layer.mixer
    assert isinstance(mixer, GatedDeltaNet)
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    keys, channels = config.linear_key_dim, config.linear_conv_dim
    # Each stays with its key head: (0, 1) and (2, 3) swap.
    order = np.array([1, 0, 3, 2])
    columns = (order[:, None] * width + np.arange(width)).ravel()
    into = np.concatenate(
        [
            np.arange(2 * keys),
            2 * keys + columns,
            channels + columns,
            channels + heads * width + order,
            channels + heads * width + heads + order,
        ]
    )
    conv = np.concatenate([np.arange(2 * keys), 2 * keys + columns])
    moved = jax.tree.map(lambda leaf: leaf, layer)
    moved_mixer = moved.mixer
    assert isinstance(moved_mixer, GatedDeltaNet)
    moved_mixer.into[...] = mixer.into[...][:, into]
    moved_mixer.conv[...] = mixer.conv[...][conv]
    moved_mixer.a_log[...] = mixer.a_log[...][order]
    moved_mixer.dt_bias[...] = mixer.dt_bias[...][order]
    x = jnp.asarray(_normal(1, 5, config.hidden_size))
    expected = np.asarray(jit_mixer(layer, x, fresh)[0])
    assert relative_error(jit_mixer(moved, x, fresh)[0], expected) >= 0.1
    moved_mixer.out[...] = mixer.out[...][columns]
    assert relative_error(jit_mixer(moved, x, fresh)[0], expected) <= 1e-5


def test_state_stays_finite_over_4096_tokens(
    layer: DecoderLayer, config: ModelConfig, fresh: DeltaNetState
) -> None:
    x = jnp.asarray(3.0 * _normal(1, 4096, config.hidden_size))
    out, state = jit_mixer(layer, x, fresh)
    assert isinstance(state, DeltaNetState)
    assert np.isfinite(out).all() and np.isfinite(state.recurrent).all()
    # A state is a sum of unit keys times bounded values, which every write also corrects.
    assert float(jnp.abs(state.recurrent).max()) <= 100.0
