"""Bias, penalties and banned stops against their definitions, applied one id after the other."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.logit_processors import needs_processing, process_logits
from qwen35_jax.sampling_arrays import TokenHistory
from tests.support.engines import fast_compilation
from tests.support.sampling import BIASES, Row, arrays_of, processed

VOCABULARY_SIZE = 9
WIDTH = 12
ROWS = 3

jitted = jax.jit(process_logits, static_argnames="vocabulary_size")
jitted_needs = jax.jit(needs_processing, static_argnames="vocabulary_size")


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def process(logits: np.ndarray, rows: list[Row]) -> np.ndarray:
    """logits: [ROWS, WIDTH]."""
    options, history = arrays_of(rows)
    found = jitted(
        jnp.asarray(logits, jnp.float32), options, history, vocabulary_size=VOCABULARY_SIZE
    )
    return np.asarray(found)


def some_logits() -> np.ndarray:
    """[ROWS, WIDTH], minus infinity where there is no token."""
    logits = np.random.default_rng(0).normal(scale=3.0, size=(ROWS, WIDTH)).astype(np.float32)
    logits[:, VOCABULARY_SIZE:] = -np.inf
    return logits


ids = st.integers(0, VOCABULARY_SIZE - 1)
rows_of = st.builds(
    Row,
    presence=st.sampled_from([0.0, 0.0, -2.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.0, -0.7, 2.0]),
    repetition=st.sampled_from([1.0, 1.0, 0.5, 1.3, 10.0]),
    min_tokens=st.sampled_from([0, 2, 4]),
    stop_ids=st.lists(ids, max_size=4).map(tuple),
    bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 0.0, 2.5, 100.0]), max_size=BIASES),
    prompt=st.lists(ids, min_size=1, max_size=4).map(tuple),
    generated=st.lists(ids, max_size=4).map(tuple),
)


@settings(max_examples=300)
@given(st.lists(rows_of, min_size=ROWS, max_size=ROWS))
def test_rows_are_changed_as_the_definitions_say(rows: list[Row]):
    logits = some_logits()
    found = process(logits, rows)
    expected = [processed(one, row) for one, row in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


EVERYTHING = Row(
    presence=1.0, frequency=0.5, repetition=1.7, min_tokens=4, stop_ids=(3,), bias={5: 9.0},
    generated=(2, 2, 4),
)  # fmt: skip


def test_a_row_that_asks_for_nothing_keeps_its_bits_beside_one_that_asks_for_everything():
    logits = some_logits()
    logits[0, 2] = -0.0
    found = process(logits, [Row(generated=(2, 3)), EVERYTHING, Row()])
    np.testing.assert_array_equal(found[[0, 2]], logits[[0, 2]])
    assert not np.array_equal(found[1], logits[1])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rows_bits_do_not_hang_on_its_place_or_neighbours(place: int):
    logits = np.tile(some_logits()[:1], (ROWS, 1))
    rows = [Row()] * ROWS
    rows[place] = EVERYTHING
    expected = process(logits, [EVERYTHING] * ROWS)[0]
    np.testing.assert_array_equal(process(logits, rows)[place], expected)


def test_presence_and_frequency_count_what_was_generated_and_repetition_the_prompt_too():
    logits = np.tile(np.float32(1.0), (ROWS, WIDTH))
    tokens: dict[str, Any] = {"prompt": (1, 2, 2), "generated": (2, 3, 3)}
    rows = [Row(presence=0.5, **tokens), Row(frequency=0.5, **tokens), Row(repetition=2, **tokens)]
    by_presence, by_frequency, by_repetition = process(logits, rows)[:, :5]
    assert list(by_presence) == [1, 1, 0.5, 0.5, 1]
    assert list(by_frequency) == [1, 1, 0.5, 0, 1]
    assert list(by_repetition) == [1, 0.5, 0.5, 0.5, 1]


def test_what_was_generated_counts_as_prompt_nowhere_after_a_recompute():
    # A preempted sequence comes back with all its tokens; only prompt_length tells them apart.
    tokens = (1, 2, 2, 3)
    split = [Row(presence=1, frequency=1, prompt=tokens[:cut], generated=tokens[cut:]) for cut in
             (1, 2, 4)]  # fmt: skip
    found = process(np.zeros((ROWS, WIDTH)), split)[:, :4]
    assert found.tolist() == [[0, 0, -3, -2], [0, 0, -2, -2], [0, 0, 0, 0]]


def test_ids_that_are_none_and_places_past_the_length_are_ignored():
    options, history = arrays_of([EVERYTHING] * ROWS)
    expected = jitted(some_logits(), options, history, vocabulary_size=VOCABULARY_SIZE)
    garbage = np.resize(np.array([-1, -WIDTH, 2**31 - 1, VOCABULARY_SIZE, WIDTH - 1]), 64)
    stop_ids, ids = np.array(options.stop_ids), np.array(history.ids)
    bias_ids = np.array(options.bias_ids)
    stop_ids[:, 1:] = garbage[: stop_ids.shape[1] - 1]
    bias_ids[:, 1:] = garbage[: BIASES - 1]
    ids[:, 6:] = 3
    found = jitted(
        some_logits(),
        replace(options, stop_ids=jnp.asarray(stop_ids), bias_ids=jnp.asarray(bias_ids)),
        replace(history, ids=jnp.asarray(ids)),
        vocabulary_size=VOCABULARY_SIZE,
    )
    np.testing.assert_array_equal(found, expected)


def test_histories_can_be_rows_of_a_table():
    rows = [replace(EVERYTHING, generated=generated) for generated in ((1,), (2, 2), (3, 4, 5))]
    options, own = arrays_of(rows)
    table = np.full((7, own.ids.shape[1]), 6, np.int32)
    slots = np.array([4, 1, 6], np.int32)
    table[slots] = own.ids
    history = TokenHistory(
        jnp.asarray(table), own.length, own.prompt_length, slots=jnp.asarray(slots)
    )
    found = jitted(some_logits(), options, history, vocabulary_size=VOCABULARY_SIZE)
    expected = jitted(some_logits(), options, own, vocabulary_size=VOCABULARY_SIZE)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("repetition", [np.finfo(np.float32).tiny, np.finfo(np.float32).max])
def test_a_penalty_that_overflows_leaves_finite_logits(repetition: float):
    found = process(some_logits(), [Row(repetition=repetition)] * ROWS)
    assert np.isfinite(found[:, :VOCABULARY_SIZE]).all()
    assert (found[:, VOCABULARY_SIZE:] == -np.inf).all()


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        (Row(), False),
        (Row(temperature=0.5, top_k=3, logprobs=5, stop_ids=(1,), generated=(2,)), False),
        (Row(min_tokens=2, generated=(1, 1)), False),
        (Row(min_tokens=2, generated=(1,)), True),
        (Row(presence=0.1), True),
        (Row(frequency=-0.1), True),
        (Row(repetition=1.01), True),
        (Row(bias={0: 1.0}), True),
    ],
    ids=str,
)
def test_only_what_changes_logits_needs_processing(row: Row, needed: bool):
    options, _ = arrays_of([Row(), row, Row()])
    assert bool(jitted_needs(options, vocabulary_size=VOCABULARY_SIZE)) is needed
