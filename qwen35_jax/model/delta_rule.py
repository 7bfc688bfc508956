"""The gated delta rule, token by token (the definition) and in chunks (for prompts).

Per head, with a state S [K, V] that starts at the given one:

    S <- exp(g_t) S
    S <- S + k_t (beta_t (v_t - S^T k_t))^T
    o_t = S^T q_t

Everything is float32 with true float32 products. Shapes: q, k [B, T, H, K]; v [B, T, H, V];
g (log decay, at most 0) and beta [B, T, H]; state [B, H, K, V]; o [B, T, H, V]. A token with g = 0
and beta = 0 leaves the state as it is, which is how padding passes through.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qwen35_jax.model.layers import Array

CHUNK = 64
# Shorter runs of tokens go one by one: a chunk is padded to 64 whatever it holds.
RECURRENT_TOKENS = 8

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The form that suits the number of tokens. Returns (o, new state)."""
    form = recurrent_delta_rule if q.shape[1] <= RECURRENT_TOKENS else chunked_delta_rule
    return form(q, k, v, g, beta, state)


def recurrent_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The definition, one token after another."""

    def token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, v_t, g_t, beta_t = inputs
        state = jnp.exp(g_t)[..., None, None] * state
        predicted = _einsum("bhkv,bhk->bhv", state, k_t)
        state = state + _einsum("bhk,bhv->bhkv", k_t, beta_t[..., None] * (v_t - predicted))
        return state, _einsum("bhkv,bhk->bhv", state, q_t)

    time_first = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    if q.shape[1] == 1:
        state, out = token(state, tuple(x[0] for x in time_first))
        return out[:, None], state
    state, out = jax.lax.scan(token, state, tuple(time_first))
    return jnp.moveaxis(out, 0, 1), state


def chunked_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The same in chunks of 64 tokens (the WY form): matrix products, and a scan over chunks.

    Inside a chunk, with G the running sum of g and D_ij = exp(G_i - G_j) for i >= j, else 0:

        A = strictly lower part of diag(beta) K K^T * D;   X = (I + A)^-1
        N = X diag(beta) V - X diag(beta exp(G)) K S
        O = diag(exp(G)) Q S + (Q K^T * D) N
        S' = exp(G_last) S + (diag(exp(G_last - G)) K)^T N
    """
    length = q.shape[1]
    inputs = _within_chunks(*(_split_chunks(x) for x in (q, k, v, g, beta)))

    state, out = jax.lax.scan(_chunk, state, inputs)
    chunks, batch, heads, _, width = out.shape
    out = jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(batch, chunks * CHUNK, heads, width)
    return out[:, :length], state


def ragged_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial: Array, first: Array
) -> tuple[Array, Array]:
    """Several sequences at once, cut into chunks of 64 tokens that follow each other.

    q, k: [N, 64, H, K]; v: [N, 64, H, V]; g, beta: [N, 64, H]. A chunk goes on from the one before
    it, or where `first` [N] bool says so from its own initial [N, H, K, V] state.
    Returns o [N, 64, H, V] and the state after each chunk [N, H, K, V].
    """
    by_head = (jnp.moveaxis(x, 2, 1)[:, None] for x in (q, k, v, g, beta))
    inputs = _within_chunks(*by_head)

    def chunk(state: Array, inputs: tuple[Any, ...]) -> tuple[Array, tuple[Array, Array]]:
        initial, first, within = inputs
        state, out = _chunk(jnp.where(first, initial[None], state), within)
        return state, (out, state[0])

    start = jnp.zeros_like(initial[:1])
    _, (out, states) = jax.lax.scan(chunk, start, (initial, first, inputs))
    return jnp.moveaxis(out[:, 0], 1, 2), states


def _within_chunks(q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, ...]:
    """All that a chunk needs besides its state. q, k, v: [chunks, B, H, CHUNK, ...]."""
    index = jnp.arange(CHUNK)
    causal = index[:, None] >= index[None, :]

    cumulative = jnp.cumsum(g, axis=-1)
    difference = cumulative[..., :, None] - cumulative[..., None, :]
    # Above the diagonal the difference is positive and its exp may overflow: mask it before.
    decay = jnp.exp(jnp.where(causal, difference, -jnp.inf))
    decay_from_start = jnp.exp(cumulative)[..., None]
    decay_to_end = jnp.exp(cumulative[..., -1:] - cumulative)[..., None]

    system = beta[..., None] * _einsum("nbhik,nbhjk->nbhij", k, k) * decay
    inverse = unit_lower_inverse(jnp.where(index[:, None] > index[None, :], system, 0.0))
    new_values = _einsum("nbhij,nbhjv->nbhiv", inverse, beta[..., None] * v)
    read_keys = _einsum("nbhij,nbhjk->nbhik", inverse, beta[..., None] * decay_from_start * k)
    attention = _einsum("nbhik,nbhjk->nbhij", q, k) * decay
    return (
        new_values,
        read_keys,
        attention,
        q * decay_from_start,
        k * decay_to_end,
        decay_from_start[..., -1:, :],
    )


def _chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """One chunk after `state` [B, H, K, V]: the state after it, and o [B, H, CHUNK, V]."""
    new_values, read_keys, attention, queries, keys, decay_of_chunk = inputs
    values = new_values - _einsum("bhik,bhkv->bhiv", read_keys, state)
    out = _einsum("bhik,bhkv->bhiv", queries, state)
    out = out + _einsum("bhij,bhjv->bhiv", attention, values)
    state = decay_of_chunk * state + _einsum("bhik,bhiv->bhkv", keys, values)
    return state, out


def unit_lower_inverse(lower: Array) -> Array:
    """(I + lower)^-1 for strictly lower triangular `lower` [..., 64, 64].

    Doubles inverted diagonal blocks: a 2b block [[P, 0], [R, Q]] with P and Q inverted has
    -Q^-1 R P^-1 below. Matrix products only: a triangular solve can't be part of a CUDA graph,
    and powers of `lower` overflow when keys are alike.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        same_pair = index[:, None] // (2 * block) == index[None, :] // (2 * block)
        below = index[:, None] // block > index[None, :] // block
        between = jnp.where(same_pair & below, lower, 0.0)
        inverse = inverse - _einsum(
            "...ij,...jk->...ik", inverse, _einsum("...ij,...jk->...ik", between, inverse)
        )
        block *= 2
    return inverse


def _split_chunks(x: Array) -> Array:
    """[B, T, H, ...] -> [chunks, B, H, CHUNK, ...], zeros after the last token."""
    batch, length, heads, *rest = x.shape
    chunks = -(-length // CHUNK)
    x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - length)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, chunks, CHUNK, heads, *rest)
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)
