"""Whether an engine's greedy tokens are the model's: `forward` over the whole row judges each.

The regret of a token is how far its logit is below the largest that may be chosen: 0 where both
choose alike, about a rounding where two were nearly equal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.latency_rounds import SteppedEngine, Timeline, random_requests, run_round
from qwen35_jax.engine.request import Request
from qwen35_jax.model.cache import init_state
from qwen35_jax.model.transformer import Qwen35, hidden_states, unembed

PROMPTS = (5, 127, 700)
NEW_TOKENS = 24
GREEDY = {"temperature": 0.0}


def measure_regret(
    engine: SteppedEngine,
    params: Qwen35,
    *,
    vocabulary_size: int,
    max_model_len: int,
    most: float,
    prompts: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Greedy answers to random prompts, run together, and what `forward` says of them.

    prompts: their lengths, PROMPTS by default; those that the context has no room for are left
    out. passed: all tokens came, and no regret is over `most`. max, mean and same (the share of
    tokens that are the likeliest) over all and by prompt length; None for what is no number.
    """
    lengths, count = _that_fit(prompts or PROMPTS, max_model_len)
    requests = [
        replace(_one_request(length, count, vocabulary_size, seed), request_id=f"regret-{length}")
        for length in lengths
    ]
    timelines = run_round(engine, requests).timelines
    answers = [timelines[request.request_id].token_ids for request in requests]
    regrets = _regrets_of(params, requests, answers, vocabulary_size)
    everything = np.concatenate(regrets)
    complete = all(len(answer) == count for answer in answers)
    return {
        "limit": most,
        "passed": bool(complete and everything.max() <= most),
        **_figures(everything),
        "by_prompt_tokens": {
            str(length): _figures(one) for length, one in zip(lengths, regrets, strict=True)
        },
        **_errors(timelines.values()),
    }


def compare_rows(
    engine: SteppedEngine,
    rows: int,
    *,
    vocabulary_size: int,
    max_model_len: int,
    seed: int = 0,
) -> dict[str, Any]:
    """One prompt in all rows of a batch: how many rows' greedy tokens are not the first row's."""
    lengths, count = _that_fit((PROMPTS[1],), max_model_len)
    request = _one_request(lengths[0], count, vocabulary_size, seed)
    requests = [replace(request, request_id=f"row-{row}") for row in range(rows)]
    timelines = run_round(engine, requests).timelines
    answers = [timelines[request.request_id].token_ids for request in requests]
    return {
        "rows": rows,
        "prompt_tokens": lengths[0],
        "tokens": count,
        "rows_that_differ": sum(answer != answers[0] for answer in answers),
        **_errors(timelines.values()),
    }


def _that_fit(prompts: Sequence[int], max_model_len: int) -> tuple[list[int], int]:
    """Prompt lengths, and how many tokens after each."""
    lengths = [length for length in prompts if length + NEW_TOKENS < max_model_len] or [1]
    return lengths, min(NEW_TOKENS, max_model_len - max(lengths))


def _one_request(length: int, count: int, vocabulary_size: int, seed: int) -> Request:
    return random_requests(
        1,
        prompt_tokens=length,
        output_tokens=count,
        vocabulary_size=vocabulary_size,
        seed=seed,
        sampling=GREEDY,
    )[0]


def _regrets_of(
    params: Qwen35,
    requests: Sequence[Request],
    answers: Sequence[Sequence[int]],
    vocabulary_size: int,
) -> list[np.ndarray]:
    """One program for all: rows are padded at their ends, which a causal model does not see."""
    rows = [
        [*request.prompt_token_ids, *answer]
        for request, answer in zip(requests, answers, strict=True)
    ]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    places = np.zeros((len(rows), max(1, *map(len, answers))), np.int32)
    for row, whole in enumerate(rows):
        ids[row, : len(whole)] = whole
        # Position t's logits choose token t + 1.
        start, count = len(requests[row].prompt_token_ids) - 1, len(answers[row])
        places[row, :count] = np.arange(start, start + count)
    regrets = np.asarray(_regrets(params, ids, places, vocabulary_size=vocabulary_size))
    return [one[: len(answer)] for one, answer in zip(regrets, answers, strict=True)]


@partial(jax.jit, static_argnames="vocabulary_size")
def _regrets(
    params: Qwen35, ids: jax.Array, places: jax.Array, *, vocabulary_size: int
) -> jax.Array:
    """ids: [B, T], places: [B, N] -> [B, N], of the token that follows each place."""
    # `forward`, but for the logits of all other places: they alone would take gigabytes.
    hidden, _ = hidden_states(params, ids, init_state(params.config, *ids.shape))
    logits = unembed(params, jnp.take_along_axis(hidden, places[..., None], axis=1))
    chosen = jnp.take_along_axis(ids, places + 1, axis=1)
    of_chosen = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    return logits[..., :vocabulary_size].max(-1) - of_chosen


def _figures(regrets: np.ndarray) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return round(float(value), 6) if np.isfinite(value) else None

    if not regrets.size:
        return {"tokens": 0, "max": None, "mean": None, "same": None}
    return {
        "tokens": regrets.size,
        "max": number(regrets.max()),
        "mean": number(regrets.mean()),
        "same": number((regrets == 0).mean()),
    }


def _errors(timelines: Iterable[Timeline]) -> dict[str, list[str]]:
    errors = sorted({timeline.error for timeline in timelines if timeline.error})
    return {"errors": errors} if errors else {}
