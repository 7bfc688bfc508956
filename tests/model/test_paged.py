"""Steps over paged KV and state slots against the plain forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.model import paged
from qwen35_jax.model.delta_rule import CHUNK
from qwen35_jax.model.paged import (
    CachePools,
    PagedKV,
    StepBatch,
    context_widths,
    init_pools,
    step_hidden_states,
)
from qwen35_jax.model.transformer import Qwen35, forward, unembed
from tests.support.models import COMPILE_FAST, tiny_params

PAGE, PAGES, TABLE, SLOTS = 16, 64, 20, 6
ROWS, CHUNKS = 4, 4
# Float32 sums in another order; measured at most 3e-4 on logits of size 5.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def params():
    return tiny_params("ratio2_tied", layers=4)


@pytest.fixture(scope="module")
def step():
    return make_step()


def make_step():
    def logits(params, ids, batch, pools):
        hidden, pools = step_hidden_states(params, ids, batch, pools)
        return unembed(params, hidden), pools

    return jax.jit(logits, donate_argnames="pools", compiler_options=COMPILE_FAST)


@pytest.fixture(scope="module")
def reference(params):
    compiled = jax.jit(forward, compiler_options=COMPILE_FAST)

    def logits(ids: list[int]) -> np.ndarray:
        padded = jnp.asarray([ids + [0] * (TABLE * PAGE - len(ids))])
        return np.asarray(compiled(params, padded)[0, : len(ids)])

    return logits


@dataclass
class Harness:
    """Runs sequences by hand-made steps and keeps the logits that each token got."""

    params: Qwen35
    step: Callable[..., Any]
    pools: CachePools
    pages: dict[int, list[int]] = field(default_factory=dict)  # by slot
    ids: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def start(self, slot: int, ids: list[int], pages: list[int]) -> None:
        self.ids[slot], self.pages[slot], self.logits[slot] = ids, pages, []

    def run(self, decodes: list[int], pieces: list[tuple[int, int]]) -> None:
        """decodes: slots; pieces: (slot, number of tokens)."""
        rows = np.zeros((ROWS, 2), np.int32)
        chunks = np.zeros((CHUNKS, 3), np.int32)
        tables = np.zeros((SLOTS, TABLE), np.int32)
        for slot, pages in self.pages.items():
            tables[slot, : len(pages)] = pages
        first, last = np.zeros(CHUNKS, bool), np.zeros(CHUNKS, bool)
        ids = np.full(ROWS + CHUNKS * CHUNK, 7, np.int32)  # the padding isn't zero on purpose
        places: dict[int, list[int]] = {}
        for row, slot in enumerate(decodes):
            position = len(self.logits[slot])
            rows[row] = slot, position
            ids[row] = self.ids[slot][position]
            places[slot] = [row]
        chunk = 0
        for slot, count in pieces:
            position = len(self.logits[slot])
            places[slot] = []
            for start in range(position, position + count, CHUNK):
                length = min(CHUNK, position + count - start)
                chunks[chunk] = slot, start, length
                first[chunk], last[chunk] = start == position, start + length == position + count
                place = ROWS + chunk * CHUNK
                ids[place : place + length] = self.ids[slot][start : start + length]
                places[slot] += range(place, place + length)
                chunk += 1
        batch = StepBatch(
            *(jnp.asarray(value) for value in (tables, rows[:, 0], rows[:, 1])),
            *(jnp.asarray(chunks[:, column]) for column in range(3)),
            *(jnp.asarray(value) for value in (first, last)),
        )
        logits, self.pools = self.step(self.params, jnp.asarray(ids), batch, self.pools)
        for slot, where in places.items():
            self.logits[slot] += list(np.asarray(logits)[where])


@pytest.fixture
def harness(params, step):
    pools = init_pools(params.config, num_pages=PAGES, page_size=PAGE, num_slots=SLOTS)
    # Whatever earlier owners left, NaN included, must not matter.
    return Harness(params, step, jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pools))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 80, length).tolist()


def assert_same(harness: Harness, slot: int, reference) -> None:
    got = np.stack(harness.logits[slot])
    np.testing.assert_allclose(got, reference(harness.ids[slot])[: len(got)], atol=TOLERANCE)


def test_rows_and_chunks_of_several_sequences_share_steps(harness, reference):
    harness.start(2, prompt(150, 1), list(range(30, 40)))
    harness.start(5, prompt(90, 2), [3, 50, 4, 51, 5, 52])
    harness.start(1, prompt(8, 3), [60])
    harness.run([], [(2, 120), (1, 5)])
    harness.run([1, 2], [(5, 70)])
    harness.run([2, 1], [(5, 3)])  # fewer tokens than the convolution remembers, and then one
    harness.run([2], [(5, 1)])
    harness.run([5, 2, 1], [])
    for slot in (1, 2, 5):
        assert_same(harness, slot, reference)


@pytest.mark.parametrize("piece", [1, 3, 63, 64, 65, 200])
def test_a_prompt_in_pieces_of_any_size_is_the_same(harness, reference, piece: int):
    count = 200 if piece > 60 else 24
    harness.start(3, prompt(count, piece), list(range(1, 14)))
    while len(harness.logits[3]) < count:
        harness.run([], [(3, min(piece, count - len(harness.logits[3])))])
    assert_same(harness, 3, reference)


def test_a_slot_and_its_pages_can_be_used_again(harness, reference):
    harness.start(4, prompt(100, 4), list(range(1, 8)))
    harness.run([], [(4, 100)])
    harness.start(4, prompt(40, 5), list(range(7, 1, -1)))
    harness.run([], [(4, 38)])
    harness.run([4], [])
    assert_same(harness, 4, reference)


def test_rows_that_are_gathered_one_by_one_are_the_same(harness, reference, monkeypatch):
    monkeypatch.setattr(paged, "TOKENS_AT_ONCE", 1)
    harness.step = make_step()
    harness.start(1, prompt(70, 7), list(range(20, 30)))
    harness.start(2, prompt(30, 8), list(range(30, 40)))
    harness.run([], [(1, 66), (2, 10)])
    harness.run([2, 1], [])
    harness.run([1], [(2, 5)])
    for slot in (1, 2):
        assert_same(harness, slot, reference)


def test_padding_touches_nothing(harness, params):
    harness.start(2, prompt(20, 6), [9, 8])
    before = jax.tree.map(np.asarray, harness.pools)
    harness.run([], [(2, 20)])
    for old, new in zip(before.layers, harness.pools.layers, strict=True):
        own = [8, 9] if isinstance(new, PagedKV) else [2]
        for old_array, new_array in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            others = np.setdiff1d(np.arange(len(old_array)), own)
            np.testing.assert_array_equal(old_array[others], np.asarray(new_array)[others])
            assert np.isfinite(np.asarray(new_array)[own[-1]]).any()


def test_the_widths_end_with_the_whole_table():
    assert context_widths(1) == [1]
    assert context_widths(4) == [4]
    assert context_widths(5) == [4, 5]
    assert context_widths(300) == [4, 16, 64, 256, 300]
