"""Rows for the sampler, and in NumPy what SamplingParams' definitions make of them."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.sampling_arrays import SamplingArrays, TokenHistory

BIASES = 3
STOPS = 12
LONGEST = 8


@dataclass
class Row:
    """One row's options, as SamplingParams names them, and its tokens so far."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    seed: int = 0
    prompt: tuple[int, ...] = (1, 2, 2)
    generated: tuple[int, ...] = ()

    def __str__(self) -> str:
        neutral = vars(Row())
        changed = {name: value for name, value in vars(self).items() if value != neutral[name]}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "neutral"


def with_seeds(row: Row, count: int) -> list[Row]:
    return [replace(row, seed=seed) for seed in range(count)]


def arrays_of(rows: list[Row]) -> tuple[SamplingArrays, TokenHistory]:
    """Unused places hold what must be ignored: ids out of range, biases without an id."""

    def column(name: str, dtype: Any) -> jax.Array:
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    def padded(values: list[tuple[Any, ...]], width: int, fill: float, dtype: Any) -> jax.Array:
        filled = [[*value, *[fill] * (width - len(value))] for value in values]
        return jnp.asarray(np.array(filled, dtype))

    lengths = [len(row.prompt) + len(row.generated) for row in rows]
    options = SamplingArrays(
        **{name: column(name, np.float32) for name in ("temperature", "top_p", "min_p")},
        **{name: column(name, np.float32) for name in ("presence", "frequency", "repetition")},
        **{name: column(name, np.int32) for name in ("top_k", "min_tokens", "logprobs")},
        seed=jnp.asarray(np.array([divmod(row.seed, 2**32) for row in rows], np.uint32)),
        step=jnp.asarray(np.array([len(row.generated) for row in rows], np.int32)),
        stop_ids=padded([row.stop_ids for row in rows], STOPS, -1, np.int32),
        bias_ids=padded([tuple(row.bias) for row in rows], BIASES, 10**6, np.int32),
        bias_values=padded([tuple(row.bias.values()) for row in rows], BIASES, 50.0, np.float32),
    )
    history = TokenHistory(
        ids=padded([row.prompt + row.generated for row in rows], LONGEST, 4, np.int32),
        length=jnp.asarray(np.array(lengths, np.int32)),
        prompt_length=jnp.asarray(np.array([len(row.prompt) for row in rows], np.int32)),
    )
    return options, history


def processed(logits: np.ndarray, row: Row) -> np.ndarray:
    """One row's logits, changed one id after the other, in float64."""
    logits = logits.astype(np.float64)
    for token_id in row.stop_ids:
        if len(row.generated) < row.min_tokens:
            logits[token_id] = -np.inf
    for token_id, bias in row.bias.items():
        logits[token_id] += bias
    for token_id in {*row.prompt, *row.generated}:
        up = logits[token_id] > 0
        logits[token_id] *= 1 / row.repetition if up else row.repetition
    for token_id in row.generated:
        logits[token_id] -= row.frequency
    for token_id in set(row.generated):
        logits[token_id] -= row.presence
    return logits


def kept_ranks(likelihood: np.ndarray, row: Row) -> list[int]:
    """Which of a row's tokens the filters keep. likelihood: best first, relative to the best."""
    kept = [rank for rank, value in enumerate(likelihood) if value >= row.min_p]
    kept = kept[: row.top_k or None]
    total = sum(likelihood[rank] for rank in kept)
    nucleus: list[int] = []
    reached = 0.0
    for rank in kept:
        if row.top_p < 1.0 and reached >= row.top_p * total:
            break
        nucleus.append(rank)
        reached += likelihood[rank]
    return nucleus


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """What a row's token is drawn from. logits: those of the vocabulary alone."""
    logits = processed(logits, row)
    likelihood = np.exp((logits - logits.max()) / row.temperature)
    order = np.argsort(-likelihood, kind="stable")
    kept = order[kept_ranks(likelihood[order], row)]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = likelihood[kept]
    return probabilities / probabilities.sum()


def assert_drawn_from(tokens: Any, expected: np.ndarray) -> None:
    """Chi-square of the tokens' counts, within four standard deviations of its mean."""
    counts = np.bincount(tokens, minlength=len(expected))
    wanted = expected * len(tokens)
    assert counts[wanted == 0].sum() == 0
    # Rare ones together: for few expected counts the statistic is no chi-square.
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)
