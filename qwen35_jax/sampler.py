"""Choose the next token of every row: pure, batched, exact, with a random stream a row.

A row's choice depends on its own logits, options, seed and step alone, never on its neighbours, its
place or the batch size. Filters act as in vLLM: temperature, then min_p, then top_k, then top_p on
what top_k left.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from qwen35_jax.sampling_params import MAX_LOGPROBS

Array = jax.Array

# What a batch needs at most, cheapest first: argmax; noise; a sort for the filters.
SamplingMode = Literal["greedy", "unfiltered", "filtered"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """Each row's options. temperature, top_p, min_p: [R] float32; top_k, step: [R] int32 (top_k 0
    keeps all; step counts the tokens generated before); seed: [R, 2] uint32, high word first."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    step: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """tokens: [R] int32. With logprobs: token_logprobs [R], top_ids and top_logprobs [R, 20]."""

    tokens: Array
    token_logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


def sample(
    logits: Array,
    options: SamplingArrays,
    *,
    vocabulary_size: int,
    mode: SamplingMode,
    with_logprobs: bool,
) -> Sampled:
    """logits: [R, V] float32. Ids at and above vocabulary_size are never chosen.

    Greedy rows (temperature 0) take the lowest id among the likeliest. Log-probabilities are the
    raw model's over all of V.
    """
    is_token = jnp.arange(logits.shape[-1]) < vocabulary_size
    allowed = jnp.where(is_token, logits, -jnp.inf)
    tokens = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    if mode != "greedy":
        is_greedy = options.temperature == 0.0
        # Relative to the best, so that a tiny temperature can't overflow to NaN.
        relative = allowed - jnp.max(allowed, axis=-1, keepdims=True)
        scaled = relative / jnp.where(is_greedy, 1.0, options.temperature)[:, None]
        # Masked again: XLA may multiply by the reciprocal, and -inf times one that is 0 is NaN.
        scaled = jnp.where(is_token, scaled, -jnp.inf)
        noise = gumbel_noise(options.seed, options.step, logits.shape[-1])
        draw = _draw_filtered if mode == "filtered" else _draw
        tokens = jnp.where(is_greedy, tokens, draw(scaled, noise, options))
    if not with_logprobs:
        return Sampled(tokens)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top_ids = jax.lax.top_k(allowed, min(MAX_LOGPROBS, vocabulary_size))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    return Sampled(tokens, (chosen - normalizer)[:, 0], top_ids, top_logits - normalizer)


def gumbel_noise(seed: Array, step: Array, size: int) -> Array:
    """[R, size] float32, row r's from (seed[r], step[r]) alone."""

    def row(words: Array, step: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, step), (size,), jnp.float32)

    return jax.vmap(row)(seed, step)


def _draw(scaled: Array, noise: Array, options: SamplingArrays) -> Array:
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _draw_filtered(scaled: Array, noise: Array, options: SamplingArrays) -> Array:
    ids = jnp.broadcast_to(jnp.arange(scaled.shape[-1], dtype=jnp.int32), scaled.shape)
    # Stable, so that among equals the lower id ranks first.
    descending, ids, noise = jax.lax.sort((-scaled, ids, noise), num_keys=1, is_stable=True)
    kept = keep_mask(-descending, options)
    best = jnp.argmax(jnp.where(kept, noise - descending, -jnp.inf), axis=-1)
    return jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]


def keep_mask(ranked: Array, options: SamplingArrays) -> Array:
    """Which of a row's scaled logits [R, V], best first, the filters keep. The best stays."""
    rank = jnp.arange(ranked.shape[-1])
    relative = jnp.exp(ranked - ranked[:, :1])
    kept = relative >= options.min_p[:, None]
    kept &= (rank < options.top_k[:, None]) | (options.top_k[:, None] == 0)
    probabilities = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (before < options.top_p[:, None]) | (options.top_p[:, None] >= 1.0)
    return kept | (rank == 0)
