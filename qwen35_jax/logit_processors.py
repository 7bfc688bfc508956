"""What changes logits before a token is chosen, greedily or not: bias, penalties, banned stops.

The result is vLLM's, whose order is ban, bias, repetition, frequency, presence. Here the ban comes
last, which is the same: nothing that is added to minus infinity, or scales it, changes it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from qwen35_jax.sampling_arrays import SamplingArrays, TokenHistory

Array = jax.Array


def needs_processing(options: SamplingArrays, vocabulary_size: int) -> Array:
    """[] bool: whether any row's logits change. Needs [R, B] and [R, E] reads, none of [R, V]."""
    return (
        _is_banning(options).any()
        | _is_id(options.bias_ids, vocabulary_size).any()
        | (options.repetition != 1.0).any()
        | _has_count_penalty(options).any()
    )


def process_logits(
    logits: Array, options: SamplingArrays, history: TokenHistory, *, vocabulary_size: int
) -> Array:
    """logits: [R, V] float32, finite or -inf -> the same, changed as the rows' options say.

    A row that asks for nothing keeps its bits, whatever its neighbours ask for. What the batch has
    no use for costs nothing but a condition.
    """
    original = logits

    def add_bias(logits: Array) -> Array:
        places = _places(options.bias_ids, vocabulary_size, logits)
        return logits.at[_rows(logits), places].add(options.bias_values, mode="drop")

    def divide_repeated(logits: Array) -> Array:
        nothing = jnp.zeros_like(history.prompt_length)
        is_repeated = _count(history, nothing, vocabulary_size, logits) > 0
        repetition = options.repetition[:, None]
        penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
        return jnp.where(is_repeated, penalised, logits)

    def subtract_counts(logits: Array) -> Array:
        count = _count(history, history.prompt_length, vocabulary_size, logits)
        logits = logits - options.frequency[:, None] * count
        return logits - options.presence[:, None] * (count > 0)

    def ban_stops(logits: Array) -> Array:
        stop_ids = jnp.where(_is_banning(options)[:, None], options.stop_ids, -1)
        places = _places(stop_ids, vocabulary_size, logits)
        return logits.at[_rows(logits), places].set(-jnp.inf, mode="drop")

    has_bias = _is_id(options.bias_ids, vocabulary_size).any()
    logits = _when(has_bias, add_bias, logits)
    logits = _when((options.repetition != 1.0).any(), divide_repeated, logits)
    logits = _when(_has_count_penalty(options).any(), subtract_counts, logits)
    # An extreme repetition penalty overflows; infinity minus infinity would be no number.
    limit = jnp.finfo(jnp.float32).max
    logits = jnp.where(original == -jnp.inf, -jnp.inf, jnp.clip(logits, -limit, limit))
    return _when(_is_banning(options).any(), ban_stops, logits)


def _when(condition: Array, change: Callable[[Array], Array], logits: Array) -> Array:
    return jax.lax.cond(condition, change, lambda unchanged: unchanged, logits)


def _is_banning(options: SamplingArrays) -> Array:
    return options.step < options.min_tokens


def _has_count_penalty(options: SamplingArrays) -> Array:
    return (options.presence != 0.0) | (options.frequency != 0.0)


def _is_id(ids: Array, vocabulary_size: int) -> Array:
    return (ids >= 0) & (ids < vocabulary_size)


def _places(ids: Array, vocabulary_size: int, logits: Array) -> Array:
    """Where to scatter; what is no id goes past the end. (A negative index would count back.)"""
    return jnp.where(_is_id(ids, vocabulary_size), ids, logits.shape[-1])


def _rows(logits: Array) -> Array:
    return jnp.arange(logits.shape[0])[:, None]


def _count(history: TokenHistory, start: Array, vocabulary_size: int, logits: Array) -> Array:
    """[R, V] int32: how often each row has each id at `start`, [R] int32, or later."""
    ids = history.ids if history.slots is None else history.ids[history.slots]
    position = jnp.arange(ids.shape[-1])
    is_counted = (position >= start[:, None]) & (position < history.length[:, None])
    places = _places(jnp.where(is_counted, ids, -1), vocabulary_size, logits)
    zeros = jnp.zeros(logits.shape, jnp.int32)
    return zeros.at[_rows(logits), places].add(1, mode="drop")
