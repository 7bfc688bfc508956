"""Choose the next token of every row: pure, batched, exact, one program for every mix of options.

A row's choice depends on its own logits, options, history, seed and step alone, never on its
neighbours, its place or the batch size. What no row of the batch asks for is skipped on the device:
an all-greedy batch pays for an argmax.

The order is vLLM's: raw log-probabilities; then banned stops, bias and penalties
(logit_processors.py), which greedy rows take the argmax of; then temperature, min_p, top_k, and
top_p on what top_k left.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from qwen35_jax.logit_processors import needs_processing, process_logits
from qwen35_jax.sampling_arrays import SamplingArrays, TokenHistory
from qwen35_jax.sampling_params import MAX_LOGPROBS
from qwen35_jax.token_noise import gumbel_noise

Array = jax.Array

# Sorting a whole row takes as long as a good part of a decode step, and few rows keep more tokens
# than these. Those that do are sorted.
CANDIDATES = 128
BLOCK = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """tokens: [R] int32. finite: [R] bool, whether all logits of the vocabulary are; where not, the
    token is 0 and means nothing.

    token_logprobs: [R] float32; top_ids, top_logprobs: [R, N] int32 and float32, best first, with
    N = 20 (fewer only in a smaller vocabulary). Zeros when no row asked for log-probabilities.
    """

    tokens: Array
    finite: Array
    token_logprobs: Array
    top_ids: Array
    top_logprobs: Array


def sample(
    logits: Array, options: SamplingArrays, history: TokenHistory, *, vocabulary_size: int
) -> Sampled:
    """logits: [R, V] float32. Ids at and above vocabulary_size are never chosen.

    Greedy rows (temperature 0) take the lowest id among the likeliest. Log-probabilities are the
    raw model's, as in `prompt_logprobs`. A row whose every id is banned takes 0.
    """
    is_token = jnp.arange(logits.shape[-1]) < vocabulary_size
    finite = (jnp.isfinite(logits) | ~is_token).all(axis=-1)
    greedy = _argmax(jnp.where(is_token, logits, -jnp.inf))

    # Inside the conditions, not before them: a copy of the logits costs as much as the argmax.
    def finite_logits() -> Array:
        return jnp.where(finite[:, None], logits, 0.0)

    tokens = jax.lax.cond(
        needs_processing(options, vocabulary_size) | (options.temperature != 0.0).any(),
        lambda: _choose(
            jnp.where(is_token, finite_logits(), -jnp.inf), options, history, vocabulary_size
        ),
        lambda: greedy,
    )
    tokens = jnp.where(finite, tokens, 0)
    wanted = (options.logprobs >= 0).any()
    tops = (logits.shape[0], min(MAX_LOGPROBS, vocabulary_size))
    token_logprobs, top_ids, top_logprobs = jax.lax.cond(
        wanted,
        lambda: prompt_logprobs(finite_logits(), tokens, vocabulary_size=vocabulary_size),
        lambda: (jnp.zeros(tops[:1]), jnp.zeros(tops, jnp.int32), jnp.zeros(tops)),
    )
    return Sampled(tokens, finite, token_logprobs, top_ids, top_logprobs)


def prompt_logprobs(
    logits: Array, next_ids: Array, *, vocabulary_size: int
) -> tuple[Array, Array, Array]:
    """Log-probabilities of the raw model, over all of V: those of next_ids, and the best 20.

    logits: [T, V] float32, next_ids: [T] int32 -> token_logprobs [T], top_ids [T, 20] and
    top_logprobs [T, 20], best first and none at or above vocabulary_size.
    """
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_token = jnp.arange(logits.shape[-1]) < vocabulary_size
    top_logits, top_ids = best_of_row(
        jnp.where(is_token, logits, -jnp.inf), min(MAX_LOGPROBS, vocabulary_size)
    )
    chosen = jnp.take_along_axis(logits, next_ids[:, None], axis=-1)
    return (chosen - normalizer)[:, 0], top_ids, top_logits - normalizer


def _choose(
    allowed: Array, options: SamplingArrays, history: TokenHistory, vocabulary_size: int
) -> Array:
    processed = jax.lax.cond(
        needs_processing(options, vocabulary_size),
        lambda: process_logits(allowed, options, history, vocabulary_size=vocabulary_size),
        lambda: allowed,
    )
    is_greedy = options.temperature == 0.0
    drawn = _tokens_if(
        ~is_greedy.all(), lambda: _draw(processed, options, vocabulary_size), processed
    )
    return jnp.where(is_greedy, _argmax(processed), drawn)


def _draw(processed: Array, options: SamplingArrays, vocabulary_size: int) -> Array:
    """A random token of each row. Which way it is drawn hangs on the row alone."""
    is_greedy = options.temperature == 0.0
    best = jnp.max(processed, axis=-1, keepdims=True)
    # Relative to the best, so that a tiny temperature can't overflow to NaN.
    relative = processed - jnp.where(best == -jnp.inf, 0.0, best)
    scaled = relative / jnp.where(is_greedy, 1.0, options.temperature)[:, None]
    # Again: XLA may multiply by the reciprocal, and -inf times one that is 0 is NaN.
    scaled = jnp.where(processed == -jnp.inf, -jnp.inf, scaled)
    top_k = jnp.where(options.top_k >= vocabulary_size, 0, options.top_k)
    filters = Filters(top_k, options.top_p, options.min_p)
    by_rank = (top_k > 0) | (options.top_p < 1.0)
    unranked_rows, ranked_rows = ~is_greedy & ~by_rank, ~is_greedy & by_rank
    unranked = _tokens_if(
        unranked_rows.any(), lambda: _draw_unranked(scaled, filters, options), scaled
    )
    ranked = _tokens_if(
        ranked_rows.any(), lambda: _draw_ranked(scaled, filters, options, ranked_rows), scaled
    )
    return jnp.where(by_rank, ranked, unranked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Filters:
    """top_k: [R] int32, 0 keeps all. top_p, min_p: [R] float32."""

    top_k: Array
    top_p: Array
    min_p: Array


def _draw_unranked(scaled: Array, filters: Filters, options: SamplingArrays) -> Array:
    """Of all tokens that min_p keeps."""
    kept = jnp.exp(scaled) >= filters.min_p[:, None]
    ids = jnp.broadcast_to(jnp.arange(scaled.shape[-1]), scaled.shape)
    noise = gumbel_noise(options.seed, options.step, ids)
    return _argmax(jnp.where(kept, scaled + noise, -jnp.inf))


def _draw_ranked(
    scaled: Array, filters: Filters, options: SamplingArrays, is_wanted: Array
) -> Array:
    """Of what all filters keep: of the best few where those hold it all, else of the sorted row."""

    def draw(ranked: Array, ids: Array, kept: Array) -> Array:
        noise = gumbel_noise(options.seed, options.step, ids)
        place = jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf), axis=-1)
        return jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0]

    def draw_sorted() -> Array:
        ids = jnp.broadcast_to(jnp.arange(scaled.shape[-1], dtype=jnp.int32), scaled.shape)
        # Stable, so that among equals the lower id ranks first.
        negated, ids = jax.lax.sort((-scaled, ids), num_keys=1, is_stable=True)
        return draw(-negated, ids, keep_mask(-negated, filters))

    ranked, ids = best_of_row(scaled, CANDIDATES)
    if ranked.shape[-1] == scaled.shape[-1]:
        return draw(ranked, ids, keep_mask(ranked, filters))
    has_count = (filters.top_k > 0) & (filters.top_k <= CANDIDATES)
    holds_all = has_count | (jnp.exp(ranked[:, -1]) < filters.min_p)
    likelihood_here = _kept_likelihood(ranked, filters).sum(axis=-1)
    # Of top_k beyond the candidates the likelihood of all that it keeps is not known here.
    may_end_here = is_wanted & ~holds_all & (filters.top_k == 0)
    likelihood_of_all = jax.lax.cond(
        may_end_here.any(),
        lambda: _kept_by_min_p(scaled, filters).sum(axis=-1),
        lambda: jnp.zeros_like(likelihood_here),
    )
    likelihood = jnp.where(holds_all, likelihood_here, likelihood_of_all)
    ends_here = may_end_here & (likelihood_here >= filters.top_p * likelihood)
    must_sort = is_wanted & ~holds_all & ~ends_here
    drawn = draw(ranked, ids, keep_mask(ranked, filters, likelihood))
    return jnp.where(must_sort, _tokens_if(must_sort.any(), draw_sorted, scaled), drawn)


def keep_mask(ranked: Array, filters: Filters, likelihood: Array | None = None) -> Array:
    """[R, N] bool: which tokens the filters keep. The best stays.

    ranked: [R, N] float32, scaled logits relative to the best, best first. likelihood: [R], that of
    all tokens that min_p and top_k keep, relative to the best; None where `ranked` holds them all.
    """
    kept = _kept_likelihood(ranked, filters)
    likelihood = kept.sum(axis=-1) if likelihood is None else likelihood
    before = jnp.pad(jnp.cumsum(kept, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    in_top_p = before < (filters.top_p * likelihood)[:, None]
    in_top_p |= (filters.top_p >= 1.0)[:, None]
    is_best = jnp.arange(ranked.shape[-1]) == 0
    return (in_top_p & _is_kept_by_rank(ranked, filters)) | is_best


def _is_kept_by_rank(ranked: Array, filters: Filters) -> Array:
    top_k = filters.top_k[:, None]
    in_top_k = (jnp.arange(ranked.shape[-1]) < top_k) | (top_k == 0)
    return in_top_k & (jnp.exp(ranked) >= filters.min_p[:, None])


def _kept_likelihood(ranked: Array, filters: Filters) -> Array:
    return jnp.where(_is_kept_by_rank(ranked, filters), jnp.exp(ranked), 0.0)


def _kept_by_min_p(scaled: Array, filters: Filters) -> Array:
    likelihood = jnp.exp(scaled)
    return jnp.where(likelihood >= filters.min_p[:, None], likelihood, 0.0)


def best_of_row(values: Array, count: int, *, block: int = BLOCK) -> tuple[Array, Array]:
    """The best of each row, best first, and where they are; the lower place first among equals.

    values: [R, V] float32 without NaN -> [R, N] float32 and int32, N = min(count, V). The best are
    in the `count` blocks whose maxima are the best, so that only few values are sorted.
    """
    # lax.top_k puts 0.0 before -0.0.
    values = jnp.where(values == 0.0, 0.0, values)
    rows, width = values.shape
    blocks = -(-width // block)
    if blocks <= count:
        return _top_k(values, min(count, width))
    padding = ((0, 0), (0, blocks * block - width))
    padded = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(rows, blocks, block)
    _, chosen = _top_k(padded.max(axis=-1), count)
    # In their own order, so that place decides among equals here too.
    chosen = jnp.sort(chosen, axis=-1)[:, :, None]
    candidates = jnp.take_along_axis(padded, chosen, axis=1).reshape(rows, count * block)
    places = (chosen * block + jnp.arange(block, dtype=jnp.int32)).reshape(rows, count * block)
    best, order = _top_k(candidates, count)
    return best, jnp.take_along_axis(places, order, axis=-1)


def _top_k(values: Array, count: int) -> tuple[Array, Array]:
    best, places = jax.lax.top_k(values, count)
    return best, places.astype(jnp.int32)


def _argmax(values: Array) -> Array:
    return jnp.argmax(values, axis=-1).astype(jnp.int32)


def _tokens_if(condition: Array, draw: Callable[[], Array], values: Array) -> Array:
    """draw()'s [R] int32, or zeros. values: [R, V]."""
    rows = values.shape[0]
    return jax.lax.cond(condition, draw, lambda: jnp.zeros((rows,), jnp.int32))
