"""The float32 model against logits recorded from transformers, on four tiny models.

The largest difference measured over everything here, relative to the largest logit, is 1.2e-4.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.model.cache import ModelState, init_state
from qwen35_jax.model.transformer import Qwen35, decode, forward, prefill
from tests.support.models import (
    COMPILE_FAST,
    Goldens,
    forked,
    load_goldens,
    relative_error,
    tiny_params,
)
from tests.support.tiny_models import TINY_CONFIGS

TOLERANCE = 1e-3
# Longer prompts run in a batch of their own, so that the others aren't padded to their length.
SHORT = 130
# Each length without padding is a compilation, so one model takes most of them. One capacity for
# all lets the prompts and the continued pieces share them.
LENGTHS_UNPADDED = {"ratio2_tied": (1, 2, 3, 8, 9, 63, 64, 65, 70, 257)}
OTHER_LENGTHS_UNPADDED = (2,)
CAPACITY = 268

fast_jit = partial(jax.jit, compiler_options=COMPILE_FAST)
jit_prefill = fast_jit(prefill)
jit_decode = fast_jit(decode)
jit_forward = fast_jit(forward)


@dataclass(frozen=True)
class Prefilled:
    """A ragged batch of prefixes of one prompt: lengths, last logits and the state after them."""

    lengths: list[int]
    logits: np.ndarray
    state: ModelState


@dataclass(frozen=True)
class GoldenModel:
    name: str
    params: Qwen35
    goldens: Goldens
    batches: tuple[Prefilled, ...]


def _prefill_prefixes(params: Qwen35, ids: np.ndarray, lengths: list[int]) -> Prefilled:
    longest = max(lengths)
    state = init_state(params.config, len(lengths), longest + 16)
    rows = jnp.broadcast_to(ids[:longest], (len(lengths), longest))
    logits, state = jit_prefill(params, rows, state, lengths=jnp.array(lengths))
    return Prefilled(lengths, np.asarray(logits), state)


@pytest.fixture(scope="module", params=TINY_CONFIGS)
def model(request: pytest.FixtureRequest) -> GoldenModel:
    params = tiny_params(request.param)
    goldens = load_goldens(f"model_{request.param}")
    lengths = [int(length) for length in goldens["prefill.lengths"]]
    batches = tuple(
        _prefill_prefixes(params, goldens["ids"], group)
        for group in (
            [length for length in lengths if length <= SHORT],
            [length for length in lengths if length > SHORT],
        )
    )
    return GoldenModel(request.param, params, goldens, batches)


def test_every_prompt_length_in_ragged_batches(model: GoldenModel) -> None:
    lengths = [length for batch in model.batches for length in batch.lengths]
    assert lengths == list(model.goldens["prefill.lengths"])
    logits = np.concatenate([batch.logits for batch in model.batches])
    for row, length in enumerate(lengths):
        error = relative_error(logits[row], model.goldens["prefill.logits"][row])
        assert error <= TOLERANCE, f"{length} tokens: {error:.1e}"


def test_prompts_without_padding(model: GoldenModel) -> None:
    goldens = model.goldens
    for length in LENGTHS_UNPADDED.get(model.name, OTHER_LENGTHS_UNPADDED):
        state = init_state(model.params.config, 1, CAPACITY)
        logits, _ = jit_prefill(model.params, goldens["ids"][None, :length], state, lengths=None)
        row = list(goldens["prefill.lengths"]).index(length)
        error = relative_error(logits[0], goldens["prefill.logits"][row])
        assert error <= TOLERANCE, f"{length} tokens: {error:.1e}"


def test_logits_at_every_position_of_a_prompt(model: GoldenModel) -> None:
    goldens = model.goldens
    logits = jit_forward(model.params, goldens["ids"][None, :97])
    assert relative_error(logits[0, goldens["whole.rows"]], goldens["whole.logits"]) <= TOLERANCE


def test_decode_steps_after_ragged_prompts(model: GoldenModel) -> None:
    goldens = model.goldens
    golden_lengths = list(goldens["decode.lengths"])
    for batch in model.batches:
        lengths = [length for length in batch.lengths if length in golden_lengths]
        golden_rows = [golden_lengths.index(length) for length in lengths]
        rows = [batch.lengths.index(length) for length in lengths]
        state = forked(batch.state, rows)
        next_ids = batch.logits[rows].argmax(-1)
        for step in range(goldens["decode.ids"].shape[1]):
            tokens = goldens["decode.ids"][golden_rows, step]
            assert (next_ids == tokens).all(), f"greedy ids at step {step}"
            logits, state = jit_decode(model.params, jnp.asarray(tokens), state)
            error = relative_error(logits, goldens["decode.logits"][golden_rows, step])
            assert error <= TOLERANCE, f"step {step}: {error:.1e}"
            next_ids = np.asarray(logits).argmax(-1)


def test_prompt_continued_in_padded_pieces(model: GoldenModel) -> None:
    _check_continuation(model, padded=True)


@pytest.mark.parametrize("model", list(LENGTHS_UNPADDED), indirect=True)
def test_prompt_continued_in_pieces_without_padding(model: GoldenModel) -> None:
    _check_continuation(model, padded=False)


def _check_continuation(model: GoldenModel, *, padded: bool) -> None:
    goldens = model.goldens
    pieces = [int(piece) for piece in goldens["continuation.pieces"]]
    state = init_state(model.params.config, 1, CAPACITY)
    start = 0
    for piece, expected in zip(pieces, goldens["continuation.logits"], strict=True):
        ids = goldens["ids"][None, start : start + piece]
        lengths = None
        if padded:
            ids = np.pad(ids, ((0, 0), (0, max(pieces) - piece)))
            lengths = jnp.array([piece])
        logits, state = jit_prefill(model.params, ids, state, lengths=lengths)
        start += piece
        error = relative_error(logits[0], expected)
        assert error <= TOLERANCE, f"{piece} tokens up to {start}: {error:.1e}"


def test_both_numerics_are_one_program_in_float32(model: GoldenModel) -> None:
    strict = tiny_params(model.name, numerics="transformers")
    ids = jnp.zeros((1, 70), jnp.int32)
    programs = [jax.jit(forward).lower(params, ids).as_text() for params in (model.params, strict)]
    assert programs[0] == programs[1]
