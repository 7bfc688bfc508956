"""What the sampler is told of a batch: each row's options, and the tokens it has so far."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

Array = jax.Array

# Room for a request's own and for the checkpoint's.
MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 32
# Fills places that hold no id.
NO_ID = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """Each row's options; names mean what SamplingParams says. [R] float32 unless said otherwise.

    temperature: 0 is greedy. top_p, min_p. top_k: [R] int32, 0 keeps all.
    seed: [R, 2] uint32, high word first. step: [R] int32, the tokens generated before. A token's
        random numbers hang on these two alone.
    presence, frequency, repetition: the penalties; 0, 0 and 1 are none. repetition is positive.
    min_tokens: [R] int32; stop_ids, [R, E] int32, are banned while step is below it.
    bias_ids, bias_values: [R, B] int32 and float32, added to those ids' logits.
    logprobs: [R] int32, -1 for a row that asks for none.

    Ids outside the vocabulary (of either sign) fill unused places of bias_ids and stop_ids. Padding
    rows are `greedy`: a row that asks for something makes the whole batch pay for it.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    step: Array
    presence: Array
    frequency: Array
    repetition: Array
    min_tokens: Array
    stop_ids: Array
    bias_ids: Array
    bias_values: Array
    logprobs: Array

    @classmethod
    def greedy(cls, rows: int) -> "SamplingArrays":
        """Rows that take the argmax and ask for nothing."""
        one = options_of(SamplingParams(temperature=0.0), seed=0, stop_ids=())
        return jax.tree.map(lambda value: jnp.broadcast_to(value, (rows, *value.shape)), one)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenHistory:
    """Each row's tokens, for the penalties.

    ids: [R, L] int32, prompt and then generated ids; valid up to `length`, [R] int32.
    prompt_length: [R] int32, how many of them are the prompt's.
    slots: [R] int32, where `ids` is a table [S, L]: which of its rows is each one's. They are
        gathered only when a penalty asks for them.
    """

    ids: Array
    length: Array
    prompt_length: Array
    slots: Array | None = None


def options_of(params: SamplingParams, *, seed: int, stop_ids: Collection[int]) -> SamplingArrays:
    """A row's options as NumPy arrays without the axis of rows, at step 0.

    seed: of 64 bits; negative ones count from 2**64. stop_ids: all that end the request, its own
    and the checkpoint's. Raises InvalidRequestError for more of them than MAX_STOP_IDS.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidRequestError(
            f"stop_token_ids and the checkpoint's stop ids are {len(stop_ids)}; at most "
            f"{MAX_STOP_IDS} go together",
            param="stop_token_ids",
        )
    bias: dict[Any, float] = dict(params.logit_bias or ())
    columns: dict[str, Any] = {
        "temperature": _float32(params.temperature),
        "top_k": np.int32(params.top_k),
        "top_p": _float32(params.top_p),
        "min_p": _float32(params.min_p),
        "seed": np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        "step": np.int32(0),
        "presence": _float32(params.presence_penalty),
        "frequency": _float32(params.frequency_penalty),
        "repetition": _float32(params.repetition_penalty),
        "min_tokens": np.int32(params.min_tokens),
        "stop_ids": _padded(sorted(stop_ids), MAX_STOP_IDS, NO_ID, np.int32),
        "bias_ids": _padded([*bias], MAX_LOGIT_BIAS, NO_ID, np.int32),
        "bias_values": _padded([*bias.values()], MAX_LOGIT_BIAS, 0.0, np.float32),
        "logprobs": np.int32(-1 if params.logprobs is None else params.logprobs),
    }
    return SamplingArrays(**columns)


def _float32(value: float) -> np.float32:
    """Zero stays zero; anything else stays a normal, finite number of its sign."""
    if value == 0.0:
        return np.float32(0.0)
    limits = np.finfo(np.float32)
    magnitude = min(max(abs(value), float(limits.tiny)), float(limits.max))
    return np.float32(magnitude if value > 0 else -magnitude)


def _padded(values: Sequence[float], width: int, fill: float, dtype: type) -> np.ndarray:
    padded = np.full((width,), fill, dtype)
    padded[: len(values)] = values
    return padded
