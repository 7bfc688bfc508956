"""The jit boundary: the two programs that run on the device, and what they donate.

Parameters go in as a flat list of arrays, split from the module once, so that a call costs one walk
over a list. The model state is donated: the caller's copy is gone after the call.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qwen35_jax.model.cache import ModelState
from qwen35_jax.model.transformer import Qwen35, decode, prefill
from qwen35_jax.sampler import Sampled, sample
from qwen35_jax.sampling_arrays import SamplingArrays, TokenHistory

Array = jax.Array


class Step:
    """The programs of one model. vocabulary_size: ids at and above it are never sampled."""

    def __init__(self, params: Qwen35, vocabulary_size: int):
        self._leaves, structure = jax.tree.flatten(params)
        self.config = params.config
        self._prefill = jax.jit(partial(_prefill, structure), donate_argnames=("state", "logits"))
        self._sample = jax.jit(partial(_sample, vocabulary_size))
        self._decode = jax.jit(
            partial(_decode, structure, vocabulary_size), donate_argnames=("state",)
        )

    def prefill(
        self, state: ModelState, logits: Array, ids: Array, lengths: Array
    ) -> tuple[ModelState, Array]:
        """Run the next piece of each row's prompt. ids: [R, T] int32, lengths: [R] int32, 0 to T.

        logits: [R, V] float32, of each row's last token so far; rows with tokens here get new ones.
        """
        return self._prefill(self._leaves, state=state, logits=logits, ids=ids, lengths=lengths)

    def sample(self, logits: Array, options: SamplingArrays) -> Sampled:
        """The first token after the prompts. Penalties find no tokens: there is no history here."""
        return self._sample(logits, options)

    def decode(
        self, state: ModelState, tokens: Array, options: SamplingArrays
    ) -> tuple[ModelState, Sampled]:
        """tokens: [R] int32, the last of each row; gives the next of each row."""
        return self._decode(self._leaves, state=state, tokens=tokens, options=options)


def _prefill(
    structure: Any,
    leaves: list[Array],
    *,
    state: ModelState,
    logits: Array,
    ids: Array,
    lengths: Array,
) -> tuple[ModelState, Array]:
    params = jax.tree.unflatten(structure, leaves)
    new_logits, state = prefill(params, ids, state, lengths=lengths)
    return state, jnp.where((lengths > 0)[:, None], new_logits, logits)


def _sample(vocabulary_size: int, logits: Array, options: SamplingArrays) -> Sampled:
    none = jnp.zeros(logits.shape[:1], jnp.int32)
    history = TokenHistory(ids=none[:, None], length=none, prompt_length=none)
    return sample(logits, options, history, vocabulary_size=vocabulary_size)


def _decode(
    structure: Any,
    vocabulary_size: int,
    leaves: list[Array],
    *,
    state: ModelState,
    tokens: Array,
    options: SamplingArrays,
) -> tuple[ModelState, Sampled]:
    params = jax.tree.unflatten(structure, leaves)
    logits, state = decode(params, tokens, state)
    return state, _sample(vocabulary_size, logits, options)
