"""Gated full attention: grouped queries, per-head norms, partial RoPE, a sigmoid output gate.

    q, gate, k, v = x W_qkv          per query head: its K query dims, then its K gate dims
    q, k = rope(rms(q) (1 + w_q)), rope(rms(k) (1 + w_k))
    out = (softmax(q k^T K^-1/2) v * sigmoid(gate)) W_o

B rows, T new tokens, S cache capacity, H query heads, G key/value heads, K head_dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.cache import AttentionCache
from qwen35_jax.model.layers import (
    Array,
    apply_rope,
    linear,
    parameter,
    rms_norm_float32,
    rounded,
    value_of,
)

# Queries scored at once, so that a long prompt's scores fit in memory.
QUERY_BLOCK = 512


class GatedAttention(nnx.Module):
    """qkv: [D, 2 H K + 2 G K] holds the query/gate pairs by head, then keys, then values."""

    def __init__(self, config: ModelConfig):
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.qkv = parameter((config.hidden_size, 2 * queries + 2 * keys), config.dtype)
        self.query_norm = parameter((config.head_dim,), config.dtype)
        self.key_norm = parameter((config.head_dim,), config.dtype)
        self.out = parameter((queries, config.hidden_size), config.dtype)

    def __call__(
        self,
        x: Array,
        cache: AttentionCache,
        positions: Array,
        valid: Array,
        rope: tuple[Array, Array],
    ) -> tuple[Array, AttentionCache]:
        """x: [B, T, D], positions: [B, T] int32, valid: [B, T] bool -> [B, T, D] and the new cache.

        Tokens that are not valid are padding: they reach neither the cache nor other tokens.
        """
        q, k, v, gate = self.project(x, rope)
        cache = write_tokens(cache, k, v, positions, valid)
        attended = causal_attention(q, cache, positions, self.config)
        return self.finish(attended, gate), cache

    def project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
        """x: [..., D] -> queries [..., H, K], keys and values [..., G, K], gates [..., H, K].

        rope: the tables for the same tokens. Queries and keys are normed and turned.
        """
        config = self.config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        q_gate, k, v = jnp.split(
            linear(x, value_of(self.qkv)), [2 * queries, 2 * queries + keys], axis=-1
        )
        leading = x.shape[:-1]
        q_gate = q_gate.reshape(*leading, config.num_attention_heads, 2 * config.head_dim)
        q, gate = jnp.split(q_gate, 2, axis=-1)
        k = k.reshape(*leading, config.num_key_value_heads, config.head_dim)
        q = self._norm_and_rope(q, value_of(self.query_norm), rope)
        k = self._norm_and_rope(k, value_of(self.key_norm), rope)
        return q, k, v.reshape(k.shape), gate

    def finish(self, attended: Array, gate: Array) -> Array:
        """attended: [..., H, K] float32, gate: [..., H, K] -> [..., D]."""
        dtype = gate.dtype
        gate = jax.nn.sigmoid(gate.astype(jnp.float32))
        if self.config.strict:
            attended, gate = (rounded(value, self.config.dtype) for value in (attended, gate))
        gated = (attended * gate).astype(dtype)
        return linear(gated.reshape(*gated.shape[:-2], -1), value_of(self.out))

    def _norm_and_rope(self, x: Array, offset: Array, rope: tuple[Array, Array]) -> Array:
        config = self.config
        normed = rms_norm_float32(x, offset, config.rms_norm_eps)
        if config.strict:
            normed = rounded(normed, config.dtype)
        turned = apply_rope(
            normed, *rope, round_products_to=config.dtype if config.strict else "float32"
        )
        return turned.astype(x.dtype)


def write_tokens(
    cache: AttentionCache, keys: Array, values: Array, positions: Array, valid: Array
) -> AttentionCache:
    """Put keys and values [B, T, G, K] at `positions` [B, T] where `valid`; nothing else moves."""
    rows = jnp.arange(positions.shape[0])[:, None]
    slots = jnp.where(valid, positions, cache.keys.shape[1])
    return AttentionCache(
        keys=cache.keys.at[rows, slots].set(keys, mode="drop"),
        values=cache.values.at[rows, slots].set(values, mode="drop"),
    )


def causal_attention(
    queries: Array, cache: AttentionCache, positions: Array, config: ModelConfig
) -> Array:
    """queries: [B, T, H, K] at `positions` [B, T], each sees cached positions up to its own.

    Returns [B, T, H, K] float32. Softmax is float32; probabilities are rounded to the model's dtype
    before they meet the values, as in every flash attention. Strict numerics also round the scores,
    before and after their scale, as transformers' eager attention does.
    """
    batch, length, heads, width = queries.shape
    groups = cache.keys.shape[2]
    grouped = queries.reshape(batch, length, groups, heads // groups, width)

    def attend_block(block: tuple[Array, Array]) -> Array:
        return attend(block[0], cache.keys, cache.values, block[1], config)

    if length <= QUERY_BLOCK:
        attended = attend(grouped, cache.keys, cache.values, positions, config)
    else:
        blocks = -(-length // QUERY_BLOCK)
        pad = blocks * QUERY_BLOCK - length
        split_queries = _split_blocks(jnp.pad(grouped, ((0, 0), (0, pad)) + ((0, 0),) * 3), blocks)
        split_positions = _split_blocks(jnp.pad(positions, ((0, 0), (0, pad))), blocks)
        attended = jax.lax.map(attend_block, (split_queries, split_positions))
        attended = jnp.moveaxis(attended, 0, 1).reshape(batch, -1, *grouped.shape[2:])[:, :length]
    return attended.reshape(batch, length, heads, width)


def attend(
    queries: Array, keys: Array, values: Array, positions: Array, config: ModelConfig
) -> Array:
    """queries: [B, T, G, H / G, K] at `positions` [B, T], keys and values: [B, S, G, K] of the
    positions from 0 -> [B, T, G, H / G, K] float32."""
    scores = jnp.einsum(
        "btghk,bsgk->bghts",
        queries,
        keys,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if config.strict:
        scores = rounded(scores, config.dtype)
    scores = scores * queries.shape[-1] ** -0.5
    if config.strict:
        scores = rounded(scores, config.dtype)
    sees = jnp.arange(keys.shape[1]) <= positions[:, None, None, :, None]
    scores = jnp.where(sees, scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum(
        "bghts,bsgk->btghk",
        probabilities.astype(values.dtype),
        values,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _split_blocks(x: Array, blocks: int) -> Array:
    """[B, blocks * N, ...] -> [blocks, B, N, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], blocks, -1, *x.shape[2:]), 1, 0)
