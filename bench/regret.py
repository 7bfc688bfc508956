"""Whether an engine's greedy tokens are the model's: `forward` over the whole row judges each."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.latency_rounds import SteppedEngine, random_requests, run_round
from qwen35_jax.model.transformer import Qwen35, forward

PROMPTS = (5, 127, 700)
NEW_TOKENS = 24
# bf16 logits of the 4B shape move by about 0.02 with the order of a sum; a wrong model's greedy
# token is whole units behind.
MOST = 0.1


def measure_regret(
    engine: SteppedEngine,
    params: Qwen35,
    *,
    vocabulary_size: int,
    max_model_len: int,
    prompts: Sequence[int] = PROMPTS,
    seed: int = 0,
) -> dict[str, Any]:
    """Greedy answers to random prompts, run together. Regret of a token: how far its logit is
    behind the largest. max, mean and same (the share that are the likeliest), by prompt length."""
    lengths = [length for length in prompts if length + NEW_TOKENS < max_model_len] or [1]
    count = min(NEW_TOKENS, max_model_len - max(lengths) - 1)
    requests = [
        replace(request, request_id=f"regret-{length}")
        for length in lengths
        for request in random_requests(
            1,
            prompt_tokens=length,
            output_tokens=count,
            vocabulary_size=vocabulary_size,
            seed=seed,
            sampling={"temperature": 0.0},
        )
    ]
    timelines = run_round(engine, requests).timelines
    padded = max(lengths) + count
    rows = {}
    for request, length in zip(requests, lengths, strict=True):
        answer = timelines[request.request_id].token_ids
        ids = np.zeros((1, padded), np.int32)
        ids[0, : length + len(answer)] = [*request.prompt_token_ids, *answer]
        behind = np.asarray(_regrets(params, ids, vocabulary_size=vocabulary_size))[0]
        # Position t's logits choose token t + 1.
        regrets = behind[length - 1 : length - 1 + len(answer)]
        rows[str(length)] = {
            "tokens": len(answer),
            "max": round(float(regrets.max()), 5),
            "mean": round(float(regrets.mean()), 6),
            "same": round(float((regrets == 0).mean()), 4),
        }
    worst = max(row["max"] for row in rows.values())
    complete = all(row["tokens"] == count for row in rows.values())
    return {"by_prompt_tokens": rows, "limit": MOST, "passed": complete and worst <= MOST}


@partial(jax.jit, static_argnames="vocabulary_size")
def _regrets(params: Qwen35, ids: jax.Array, *, vocabulary_size: int) -> jax.Array:
    """ids: [1, T] -> [1, T - 1] float32, by the token that follows each position."""
    logits = forward(params, ids)[:, :-1, :vocabulary_size]
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    return logits.max(-1) - chosen
