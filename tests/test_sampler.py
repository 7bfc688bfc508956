"""The sampler by its distributions, and by what may and may not change a row's token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from qwen35_jax.sampler import (
    CANDIDATES,
    Filters,
    Sampled,
    best_of_row,
    keep_mask,
    prompt_logprobs,
    sample,
)
from tests.support.engines import fast_compilation, log_softmax
from tests.support.sampling import (
    Row,
    arrays_of,
    assert_drawn_from,
    distribution,
    kept_ranks,
    with_seeds,
)

VOCABULARY_SIZE = 9
WIDTH = 12
# More than the candidates: some rows' tokens are drawn from these, some from the sorted row.
MANY = 290
MANY_WIDTH = 300
DRAWS = 4096

jitted_sample = jax.jit(sample, static_argnames="vocabulary_size")
jitted_keep_mask = jax.jit(keep_mask)
jitted_best_of_row = jax.jit(best_of_row, static_argnames=("count", "block"))


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def draw(logits: np.ndarray, rows: list[Row], *, vocabulary_size: int = VOCABULARY_SIZE) -> Sampled:
    arrays = arrays_of(rows)
    found = jitted_sample(
        jnp.asarray(logits, jnp.float32), *arrays, vocabulary_size=vocabulary_size
    )
    return jax.device_get(found)


def some_logits(rows: int, *, scale: float = 1.5, seed: int = 0) -> np.ndarray:
    """[R, WIDTH], the likeliest of them at an id that is no token."""
    logits = np.random.default_rng(seed).normal(scale=scale, size=(rows, WIDTH))
    logits[:, VOCABULARY_SIZE:] = 50.0
    return logits.astype(np.float32)


def many_logits(rows: int, *, scale: float = 1.5) -> np.ndarray:
    """[R, MANY_WIDTH], likewise."""
    logits = np.random.default_rng(1).normal(scale=scale, size=(rows, MANY_WIDTH))
    logits[:, MANY:] = 50.0
    return logits.astype(np.float32)


SO_FAR: dict[str, Any] = {"prompt": (1, 2, 2, 0), "generated": (0, 3, 3)}


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.5),
        Row(temperature=2.0),
        Row(top_k=1),
        Row(top_k=4),
        Row(top_k=100),
        Row(top_p=1e-6),
        Row(top_p=0.7),
        Row(min_p=0.15),
        Row(min_p=1.0),
        Row(temperature=0.5, min_p=0.15),
        Row(temperature=1.5, top_k=5, top_p=0.8, min_p=0.05),
        Row(top_k=3, top_p=0.9),
        Row(presence=1.5, **SO_FAR),
        Row(frequency=-0.8, **SO_FAR),
        Row(repetition=1.8, **SO_FAR),
        Row(repetition=0.4, temperature=1.5, **SO_FAR),
        Row(bias={0: 2.0, 4: -1.0, 8: -100.0}),
        Row(min_tokens=4, stop_ids=(0, 7), **SO_FAR),
        Row(min_tokens=3, stop_ids=(0, 7), **SO_FAR),
        Row(presence=0.5, frequency=0.3, repetition=1.2, bias={3: 2.0}, min_tokens=9, top_k=6,
            stop_ids=(1,), temperature=0.8, top_p=0.9, min_p=0.01, **SO_FAR),
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_definition(row: Row):
    logits = some_logits(1)
    tokens = draw(np.tile(logits, (DRAWS, 1)), with_seeds(row, DRAWS)).tokens
    assert_drawn_from(tokens, distribution(logits[0, :VOCABULARY_SIZE], row))


@pytest.mark.parametrize(
    ("scale", "row"),
    [
        (2.0, Row()),
        (2.0, Row(min_p=0.05)),
        (3.0, Row(top_p=0.5)),
        (3.0, Row(top_k=20, top_p=0.95)),
        (0.5, Row(top_k=CANDIDATES)),
        (0.5, Row(top_k=CANDIDATES + 1)),
        (0.1, Row(top_p=0.9)),
        (0.1, Row(top_p=0.9, top_k=200)),
        (0.1, Row(top_p=0.4, top_k=200)),
        (0.1, Row(top_p=0.9, min_p=0.6)),
        (0.1, Row(top_p=0.99, min_p=0.95)),
        (0.1, Row(top_p=0.999, top_k=280, min_p=0.8)),
    ],
    ids=str,
)
def test_draws_from_many_tokens_follow_the_definition(scale: float, row: Row):
    logits = many_logits(1, scale=scale)
    tokens = draw(np.tile(logits, (DRAWS, 1)), with_seeds(row, DRAWS), vocabulary_size=MANY).tokens
    assert_drawn_from(tokens, distribution(logits[0, :MANY], row))


def test_rows_of_all_kinds_are_each_drawn_as_alone():
    flat = many_logits(1, scale=0.1)
    kinds = [Row(), Row(top_k=5), Row(top_p=0.9), Row(top_k=200, top_p=0.5), Row(temperature=0.0)]
    rows = [replace(kinds[seed % 5], seed=seed) for seed in range(DRAWS)]
    together = draw(np.tile(flat, (DRAWS, 1)), rows, vocabulary_size=MANY).tokens
    for place, kind in enumerate(kinds):
        alone = draw(np.tile(flat, (DRAWS, 1)), with_seeds(kind, DRAWS), vocabulary_size=MANY)
        np.testing.assert_array_equal(together[place::5], alone.tokens[place::5])


def test_every_way_to_draw_uses_the_same_noise():
    # Each of these filters leaves out next to nothing, so that the tokens are the same.
    logits = np.tile(many_logits(1, scale=4.0), (DRAWS, 1))
    ways = [Row(), Row(top_p=0.999999), Row(top_k=CANDIDATES), Row(top_k=CANDIDATES + 1)]
    tokens = [draw(logits, with_seeds(row, DRAWS), vocabulary_size=MANY).tokens for row in ways]
    for other in tokens[1:]:
        assert (other == tokens[0]).mean() > 0.995


def test_top_p_counts_only_what_top_k_left():
    # Of these, the best two have 0.75 of the whole but 1 of what top_k leaves.
    logits = np.full(WIDTH, -np.inf)
    logits[:4] = np.log([0.5, 0.25, 0.125, 0.125])
    logits = np.maximum(np.tile(logits, (DRAWS, 1)), -1e30)
    tokens = draw(logits, with_seeds(Row(top_k=2, top_p=0.6), DRAWS)).tokens
    assert set(tokens) == {0}


EIGHT = 8


def test_greedy_takes_the_lowest_id_among_the_likeliest():
    logits = np.zeros((EIGHT, WIDTH))
    logits[1, [3, 7]] = 2.0
    logits[2, [VOCABULARY_SIZE - 1, VOCABULARY_SIZE]] = 2.0
    greedy = [Row(temperature=0.0)] * 3
    for others in (Row(temperature=0.0), Row(), Row(top_p=0.5), Row(bias={3: 1.0})):
        tokens = draw(logits, [*greedy, *[others] * 5]).tokens
        assert list(tokens[:3]) == [0, 3, VOCABULARY_SIZE - 1]


def test_greedy_is_after_bias_penalties_and_ban():
    logits = np.tile(np.linspace(0.0, 1.0, WIDTH), (EIGHT, 1))
    logits[:, VOCABULARY_SIZE:] = 50.0
    last = VOCABULARY_SIZE - 1
    options: list[dict[str, Any]] = [
        {},
        {"bias": {last: -100.0}},
        {"bias": {2: 100.0}},
        {"bias": {0: 1.0, last: 1.0, VOCABULARY_SIZE: 100.0}},
        {"stop_ids": (last, last - 1), "min_tokens": 1},
        {"presence": 0.7, "prompt": (7,), "generated": (8, 6)},
        {"frequency": -0.5, "generated": (2, 2)},
        {"repetition": 1.5, "prompt": (last,)},
    ]
    rows = [Row(temperature=0.0, **one) for one in options]
    assert list(draw(logits, rows).tokens) == [last, 7, 2, last, 6, 7, 2, 7]


def test_stop_ids_are_not_chosen_before_min_tokens():
    logits = np.zeros((EIGHT, WIDTH))
    logits[:, 5] = 30.0
    for temperature in (0.0, 1.0):
        rows = [
            Row(temperature=temperature, min_tokens=5, stop_ids=(5, 0), generated=(1,) * step)
            for step in (0, 1, 2, 3, 4, 5, 5, 5)
        ]
        tokens = draw(logits, rows).tokens
        assert not set(tokens[:5]) & {0, 5}
        assert list(tokens[5:]) == [5, 5, 5]


def test_a_row_whose_every_id_is_banned_takes_0_and_harms_no_one():
    logits = some_logits(EIGHT)
    rows = with_seeds(Row(top_p=0.9), EIGHT)
    expected = draw(logits, rows).tokens[4:]
    banned = {"stop_ids": tuple(range(VOCABULARY_SIZE)), "min_tokens": 1}
    kinds = (Row(), Row(temperature=0.0), Row(top_p=0.5), Row(top_k=3, min_p=0.1))
    tokens = draw(logits, [*(replace(row, **banned) for row in kinds), *rows[4:]]).tokens
    assert list(tokens) == [0, 0, 0, 0, *expected]


@pytest.mark.parametrize("beyond", [0.0, 1e30, np.inf, np.nan], ids=str)
def test_ids_at_and_above_the_vocabulary_are_never_chosen(beyond: float):
    logits = some_logits(DRAWS)
    logits[:, VOCABULARY_SIZE:] = beyond
    limits = np.finfo(np.float32)
    kinds = [
        Row(temperature=temperature, top_k=top_k)
        for temperature in (1.0, 0.0, float(limits.tiny), 1e30, float(limits.max))
        for top_k in (0, 100, 3)
    ]
    rows = [replace(kinds[seed % len(kinds)], seed=seed) for seed in range(DRAWS)]
    sampled = draw(logits, rows)
    assert sampled.tokens.min() >= 0
    assert sampled.tokens.max() < VOCABULARY_SIZE
    assert sampled.finite.all()


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform():
    logits = some_logits(DRAWS)
    best = logits[:, :VOCABULARY_SIZE].argmax(-1)
    limits = np.finfo(np.float32)
    for row in (Row(), Row(top_k=VOCABULARY_SIZE - 1), Row(top_p=0.9999)):
        tiny = with_seeds(replace(row, temperature=float(limits.tiny)), DRAWS)
        np.testing.assert_array_equal(draw(logits, tiny).tokens, best)
    huge = with_seeds(Row(temperature=float(limits.max)), DRAWS)
    assert_drawn_from(draw(logits, huge).tokens, np.full(VOCABULARY_SIZE, 1 / VOCABULARY_SIZE))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf], ids=str)
def test_a_row_that_is_not_finite_says_so_and_harms_no_one(wrong: float):
    rows = [Row(logprobs=3), Row(top_p=0.9, logprobs=3), Row(temperature=0.0, logprobs=3),
            Row(presence=1.0, generated=(1,), logprobs=3)] * 2  # fmt: skip
    logits = some_logits(EIGHT)
    expected = draw(logits, rows)
    logits[[0, 1, 2, 3], [0, 3, 8, 5]] = wrong
    sampled = draw(logits, rows)
    assert list(sampled.finite) == [False] * 4 + [True] * 4
    assert list(sampled.tokens[:4]) == [0, 0, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sampled))
    for found, alone in zip(jax.tree.leaves(sampled), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found[4:], alone[4:])


MIXED = [
    Row(temperature=0.0, seed=1),
    Row(seed=2, generated=(5,)),
    Row(temperature=0.7, top_k=3, seed=3, generated=(1, 2)),
    Row(temperature=1.3, top_p=0.8, seed=4, generated=(2, 2)),
    Row(min_p=0.9, seed=2**63 + 5, logprobs=20),
    Row(top_k=1, top_p=0.5, seed=6, logprobs=0),
    Row(temperature=0.0, top_k=5, bias={7: 1.0}, seed=7),
    Row(top_k=200, top_p=0.9, presence=1.0, generated=(3, 4), seed=8, logprobs=5),
]
# Nearly flat, so that every row's noise decides, and some rows must be sorted.
FLAT = many_logits(EIGHT, scale=0.1)


@pytest.mark.parametrize(
    "places",
    [[0], [1], [3], [7], [7, 6, 5, 4, 3, 2, 1, 0], [3] * 8, [4, 4, 4, 1, 1, 7, 0, 5]],
    ids=str,
)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(places: list[int]):
    together = draw(FLAT, MIXED, vocabulary_size=MANY)
    assert len(set(together.tokens)) > 5
    again = draw(FLAT[places], [MIXED[place] for place in places], vocabulary_size=MANY)
    np.testing.assert_array_equal(again.tokens, together.tokens[places])
    asked = [index for index, place in enumerate(places) if MIXED[place].logprobs >= 0]
    from_places = [places[index] for index in asked]
    np.testing.assert_array_equal(again.top_ids[asked], together.top_ids[from_places])
    for name in ("token_logprobs", "top_logprobs"):
        found, expected = getattr(again, name)[asked], getattr(together, name)[from_places]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_one_program_serves_every_mix():
    program: Any = jitted_sample
    draw(FLAT, MIXED, vocabulary_size=MANY)
    compiled = program._cache_size()
    for row in MIXED:
        draw(FLAT, [row] * EIGHT, vocabulary_size=MANY)
    assert program._cache_size() == compiled


def test_a_greedy_batch_pays_for_no_more_than_an_argmax():
    jaxpr = jax.make_jaxpr(lambda *arrays: sample(*arrays, vocabulary_size=MANY))(
        jnp.asarray(FLAT), *arrays_of(MIXED)
    )

    def always_run(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":
                continue
            yield equation
            for inner in jax.tree.leaves(list(equation.params.values())):
                if hasattr(inner, "eqns"):
                    yield from always_run(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from always_run(inner.jaxpr)

    wide = {
        equation.primitive.name
        for equation in always_run(jaxpr.jaxpr)
        if any(getattr(value.aval, "shape", ()) == FLAT.shape for value in equation.invars)
    }
    assert "argmax" in wide
    elementwise = {"is_finite", "or", "select_n", "eq", "ne", "lt"}
    assert wide - elementwise - {"jit", "pjit"} <= {"argmax", "reduce_and"}


def test_a_seed_and_a_step_give_the_same_token_whatever_was_generated():
    logits = np.zeros((EIGHT, WIDTH))
    rows = [Row(seed=3, generated=(token, 5)) for token in range(EIGHT)]
    assert len(set(draw(logits, rows).tokens)) == 1


def test_every_part_of_seed_and_step_changes_the_draws():
    logits = np.zeros((EIGHT, WIDTH))
    seeds = [[0] * EIGHT, [1] * EIGHT, [2**32] * EIGHT, [*range(EIGHT)]]
    steps = [(), (1,), (1, 1), (1, 1, 1)]
    draws = [
        tuple(
            draw(logits, [Row(seed=seed, generated=step * (place % 2)) for place, seed in
                          enumerate(same)]).tokens
        )
        for same in seeds
        for step in steps[1:]
    ]  # fmt: skip
    assert len(set(draws)) == len(draws)


@st.composite
def filters_of(draw_value: Any) -> tuple[np.ndarray, Row]:
    # Few different values, so that ties are common.
    steps = draw_value(st.lists(st.sampled_from([0.0, 0.25, 1.0, 8.0]), min_size=7, max_size=7))
    ranked = -np.cumsum([0.0, *steps]).astype(np.float32)
    top_k = draw_value(st.sampled_from([0, 1, 2, 5, 8, 2**31 - 1]))
    top_p = draw_value(st.sampled_from([1e-30, 0.1, 0.33, 0.6, 0.9, 0.999, 1.0]))
    min_p = draw_value(st.sampled_from([0.0, 1e-30, 0.01, 0.3, 0.9, 1.0]))
    return ranked, Row(top_k=top_k, top_p=top_p, min_p=min_p)


# Their sums are exact, and the border of top_p falls between two of them.
FOUR_EQUALS = np.array([0, 0, 0, 0, -200, -200, -200, -200], np.float32)


@example((FOUR_EQUALS, Row(top_p=0.5)))
@example((FOUR_EQUALS, Row(top_k=3, min_p=1.0)))
@given(filters_of())
def test_keep_mask_is_the_textbook_loop(case: tuple[np.ndarray, Row]):
    ranked, row = case
    likelihood = np.exp(ranked.astype(np.float64))
    kept = kept_ranks(likelihood, row)
    near = [kept_ranks(likelihood, replace(row, top_p=row.top_p * s)) for s in (0.999, 1.001)]
    assume(row.top_p in (0.5, 1.0) or near == [kept, kept])
    filters = Filters(
        jnp.array([row.top_k]), jnp.array([row.top_p]), jnp.array([row.min_p], jnp.float32)
    )
    mask = jitted_keep_mask(jnp.asarray(ranked)[None], filters)
    assert list(np.flatnonzero(mask[0])) == kept


@given(
    st.lists(st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.5, 2.0]), min_size=22, max_size=22),
    st.sampled_from([(3, 4), (1, 5), (5, 4), (22, 4)]),
)
def test_the_best_of_a_row_are_a_stable_sorts(values: list[float], sizes: tuple[int, int]):
    count, block = sizes
    row = np.array(values, np.float32)
    best, places = jitted_best_of_row(jnp.asarray(row)[None], count=count, block=block)
    order = np.argsort(-row, kind="stable")[:count]
    np.testing.assert_array_equal(places[0], order)
    np.testing.assert_array_equal(best[0], row[order])


def test_the_best_of_rows_as_long_as_a_real_vocabulary():
    logits = np.random.default_rng(0).normal(size=(2, 20_001)).astype(np.float32).round(2)
    best, places = jitted_best_of_row(jnp.asarray(logits), count=CANDIDATES)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :CANDIDATES]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(best, np.take_along_axis(logits, order, -1))


def test_logprobs_are_of_the_raw_logits_over_all_of_them():
    logits = np.random.default_rng(1).normal(scale=3.0, size=(DRAWS, WIDTH)).astype(np.float32)
    cold, warm = (
        draw(
            logits,
            with_seeds(
                Row(temperature=temperature, top_k=5, bias={1: 2.0}, presence=1.0, logprobs=0,
                    generated=(3,)),
                DRAWS,
            ),
        )
        for temperature in (0.3, 1.0)
    )  # fmt: skip
    same = cold.tokens == warm.tokens
    assert same.any() and not same.all()
    np.testing.assert_array_equal(cold.token_logprobs[same], warm.token_logprobs[same])
    np.testing.assert_array_equal(cold.top_logprobs, warm.top_logprobs)
    expected = log_softmax(logits)
    for sampled in (cold, warm):
        of_tokens = np.take_along_axis(expected, np.asarray(sampled.tokens)[:, None], -1)[:, 0]
        np.testing.assert_allclose(sampled.token_logprobs, of_tokens, atol=1e-5)


def test_top_logprobs_are_twenty_best_first_without_ids_beyond_the_vocabulary():
    sampled = draw(FLAT, [*MIXED[1:], MIXED[4]], vocabulary_size=MANY)
    order = np.argsort(-FLAT[:, :MANY], axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(sampled.top_ids, order)
    expected = np.take_along_axis(log_softmax(FLAT), order, -1)
    np.testing.assert_allclose(sampled.top_logprobs, expected, rtol=1e-5)


def test_a_tokens_logprob_is_the_same_number_in_both_places():
    # Clients compare them as exact floats.
    sampled = draw(some_logits(DRAWS), with_seeds(Row(logprobs=1), DRAWS))
    place = np.nonzero(sampled.top_ids == sampled.tokens[:, None])
    assert len(place[0]) == DRAWS
    np.testing.assert_array_equal(sampled.top_logprobs[place], sampled.token_logprobs)


def test_without_a_wish_for_logprobs_they_are_zeros():
    sampled = draw(FLAT, [Row()] * EIGHT, vocabulary_size=MANY)
    assert sampled.top_ids.shape == sampled.top_logprobs.shape == (EIGHT, 20)
    assert not sampled.token_logprobs.any()
    assert not sampled.top_logprobs.any()


def test_prompt_logprobs_are_those_of_the_next_ids_and_of_the_best_twenty():
    next_ids = np.array([0, 5, 17, 289, 3, 3, 100, 1], np.int32)
    logprobs, top_ids, top_logprobs = jax.jit(
        lambda logits, ids: prompt_logprobs(logits, ids, vocabulary_size=MANY)
    )(FLAT, next_ids)
    expected = log_softmax(FLAT)
    np.testing.assert_allclose(logprobs, expected[np.arange(EIGHT), next_ids], rtol=1e-5)
    order = np.argsort(-FLAT[:, :MANY], axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(expected, order, -1), rtol=1e-5)
