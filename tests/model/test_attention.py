"""Gated attention: head sharing, gate layout, causality, query blocks, the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import attention
from qwen35_jax.model.attention import GatedAttention, causal_attention, write_tokens
from qwen35_jax.model.cache import AttentionCache
from qwen35_jax.model.decoder_layer import DecoderLayer
from qwen35_jax.model.layers import apply_rope, rope_tables
from tests.support.models import (
    COMPILE_FAST,
    layer_state,
    relative_error,
    run_mixer,
    tiny_config,
    tiny_params,
)

jit_mixer = jax.jit(run_mixer, compiler_options=COMPILE_FAST)
jit_attention = jax.jit(causal_attention, static_argnames="config", compiler_options=COMPILE_FAST)

NAME = "ratio2_tied"
FULL_LAYER = 3


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Eight query heads on two key heads."""
    return tiny_config(NAME)


@pytest.fixture(scope="module")
def layer() -> DecoderLayer:
    layer = tiny_params(NAME).layers[FULL_LAYER]
    assert isinstance(layer.mixer, GatedAttention)
    return layer


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _random_cache(config: ModelConfig, batch: int, capacity: int) -> AttentionCache:
    shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
    return AttentionCache(
        jnp.asarray(_normal(*shape, seed=1)), jnp.asarray(_normal(*shape, seed=2))
    )


def _reference(q: np.ndarray, cache: AttentionCache, positions: np.ndarray) -> np.ndarray:
    """float64 attention; query head h reads key head h // (heads / key heads)."""
    q = q.astype(np.float64)
    keys, values = (np.asarray(x, np.float64) for x in (cache.keys, cache.values))
    batch, length, heads, width = q.shape
    share = heads // keys.shape[2]
    out = np.zeros(q.shape)
    for row, token, head in np.ndindex(batch, length, heads):
        end = positions[row, token] + 1
        scores = keys[row, :end, head // share] @ q[row, token, head] / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        out[row, token, head] = weights / weights.sum() @ values[row, :end, head // share]
    return out


def test_neighbouring_query_heads_share_a_key_head(config: ModelConfig) -> None:
    q = _normal(2, 5, config.num_attention_heads, config.head_dim)
    cache = _random_cache(config, 2, 12)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    out = jit_attention(jnp.asarray(q), cache, jnp.asarray(positions), config)
    assert relative_error(out, _reference(q, cache, positions)) <= 1e-5


def test_keys_after_a_query_do_not_reach_it(config: ModelConfig) -> None:
    q = jnp.asarray(_normal(1, 4, config.num_attention_heads, config.head_dim))
    cache, positions = _random_cache(config, 1, 8), jnp.arange(4)[None]
    later = AttentionCache(cache.keys.at[:, 4:].set(1e4), cache.values.at[:, 4:].set(1e4))
    np.testing.assert_array_equal(
        jit_attention(q, cache, positions, config), jit_attention(q, later, positions, config)
    )


@pytest.mark.parametrize("length", [5, 8, 9, 17])
def test_query_blocks_equal_one_block(
    length: int, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = jnp.asarray(_normal(2, length, config.num_attention_heads, config.head_dim))
    cache = _random_cache(config, 2, 30)
    positions = jnp.stack([jnp.arange(length), 11 + jnp.arange(length)])
    whole = jit_attention(q, cache, positions, config)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    # Not through jit_attention, which has a program with the real block size.
    attend = jax.jit(lambda q, cache, positions: causal_attention(q, cache, positions, config))
    blocks = attend(q, cache, positions)
    assert blocks.shape == whole.shape
    assert relative_error(blocks, np.asarray(whole)) <= 1e-6


def test_projection_holds_each_heads_query_then_its_gate(
    layer: DecoderLayer, config: ModelConfig
) -> None:
    """One token attends to itself alone, so that its mixer output is (value * gate) W_o."""
    mixer = layer.mixer
    assert isinstance(mixer, GatedAttention)
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    x = _normal(1, 1, config.hidden_size)
    out, _ = jit_mixer(
        layer, jnp.asarray(x), layer_state(config, "full_attention", batch=1, capacity=1)
    )
    projected = x[0, 0].astype(np.float64) @ np.asarray(mixer.qkv[...], np.float64)
    pairs, values = projected[: 2 * heads * width], projected[-groups * width :]
    gate = pairs.reshape(heads, 2 * width)[:, width:]
    value = np.repeat(values.reshape(groups, width), heads // groups, axis=0)
    expected = (value / (1 + np.exp(-gate))).ravel() @ np.asarray(mixer.out[...], np.float64)
    assert relative_error(out[0, 0], expected) <= 1e-5


def test_cache_holds_normed_and_turned_keys_and_raw_values(
    layer: DecoderLayer, config: ModelConfig
) -> None:
    mixer = layer.mixer
    assert isinstance(mixer, GatedAttention)
    groups, width = config.num_key_value_heads, config.head_dim
    x = jnp.asarray(_normal(1, 3, config.hidden_size))
    _, cache = jit_mixer(
        layer, x, layer_state(config, "full_attention", batch=1, capacity=9), start=4
    )
    assert isinstance(cache, AttentionCache)
    projected = np.asarray(x[0], np.float64) @ np.asarray(mixer.qkv[...], np.float64)
    keys = projected[:, -2 * groups * width : -groups * width].reshape(3, groups, width)
    keys /= np.sqrt(np.mean(keys**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    keys *= 1 + np.asarray(mixer.key_norm[...], np.float64)
    tables = rope_tables(jnp.array([[4, 5, 6]]), config)
    turned = apply_rope(jnp.asarray(keys, jnp.float32)[None], *tables, round_products_to="float32")
    assert relative_error(cache.keys[:, 4:7], np.asarray(turned)) <= 1e-5
    values = projected[:, -groups * width :].reshape(3, groups, width)
    assert relative_error(cache.values[0, 4:7], values) <= 1e-5
    for untouched in (cache.keys, cache.values):
        assert not np.any(untouched[:, :4]) and not np.any(untouched[:, 7:])


def test_only_valid_tokens_are_written_to_the_cache(config: ModelConfig) -> None:
    cache = _random_cache(config, 2, 6)
    shape = (2, 3, config.num_key_value_heads, config.head_dim)
    new = jnp.full(shape, jnp.nan).at[0, :2].set(5.0).at[1, :1].set(5.0)
    positions = jnp.array([[1, 2, 3], [4, 5, 6]])
    valid = jnp.array([[True, True, False], [True, False, False]])
    written = write_tokens(cache, new, new, positions, valid)
    for after, before in ((written.keys, cache.keys), (written.values, cache.values)):
        expected = np.asarray(before).copy()
        expected[0, 1:3], expected[1, 4] = 5.0, 5.0
        np.testing.assert_array_equal(after, expected)


def test_strict_numerics_round_the_scores(config: ModelConfig) -> None:
    q = jnp.asarray(_normal(1, 3, config.num_attention_heads, config.head_dim), jnp.bfloat16)
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _random_cache(config, 1, 3))
    positions, half = jnp.arange(3)[None], config.replace(dtype="bfloat16")
    default = jit_attention(q, cache, positions, half)
    strict = jit_attention(q, cache, positions, half.replace(numerics="transformers"))
    # A lone token's weight is 1 whatever its score is rounded to.
    np.testing.assert_array_equal(default[:, 0], strict[:, 0])
    assert np.any(np.asarray(default[:, 1:]) != np.asarray(strict[:, 1:]))
