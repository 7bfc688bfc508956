"""The sampler by its distributions, and by replay of seeds across batch shapes."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from qwen35_jax.sampler import Sampled, SamplingArrays, SamplingMode, keep_mask, sample
from tests.support.engines import fast_compilation, log_softmax

VOCABULARY_SIZE = 9
WIDTH = 12
DRAWS = 8192

jitted_sample = jax.jit(sample, static_argnames=("vocabulary_size", "mode", "with_logprobs"))
jitted_keep_mask = jax.jit(keep_mask)


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def options(rows: int, **columns: Any) -> SamplingArrays:
    """Sampling at temperature 1 with nothing filtered, except for `columns`: one value or [R]."""

    def column(name: str, dtype: Any, neutral: float) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(columns.pop(name, neutral), dtype), (rows,)))

    seed = columns.pop("seed", np.stack([np.zeros(rows), np.arange(rows)], axis=1))
    made = SamplingArrays(
        temperature=column("temperature", np.float32, 1.0),
        top_k=column("top_k", np.int32, 0),
        top_p=column("top_p", np.float32, 1.0),
        min_p=column("min_p", np.float32, 0.0),
        seed=jnp.asarray(np.broadcast_to(np.asarray(seed, np.uint32), (rows, 2))),
        step=column("step", np.int32, 0),
    )
    assert not columns
    return made


def draw(
    logits: np.ndarray,
    arrays: SamplingArrays,
    *,
    mode: SamplingMode = "filtered",
    with_logprobs: bool = False,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> Sampled:
    sampled = jitted_sample(
        jnp.asarray(logits, jnp.float32),
        arrays,
        vocabulary_size=vocabulary_size,
        mode=mode,
        with_logprobs=with_logprobs,
    )
    return jax.device_get(sampled)


def some_logits(rows: int, *, seed: int = 0) -> np.ndarray:
    """[R, WIDTH], the likeliest of them at an id that is no token."""
    logits = np.random.default_rng(seed).normal(scale=1.5, size=(rows, WIDTH)).astype(np.float32)
    logits[:, VOCABULARY_SIZE:] = 50.0
    return logits


def kept_ids(ranked: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ranks that stay, of scaled logits best first, by the definitions of SamplingParams."""
    likelihood = np.exp(ranked.astype(np.float64) - float(ranked[0]))
    kept = [rank for rank, value in enumerate(likelihood) if value >= min_p]
    kept = kept[: top_k or None]
    total = sum(likelihood[rank] for rank in kept)
    nucleus: list[int] = []
    reached = 0.0
    for rank in kept:
        if reached >= top_p:
            break
        nucleus.append(rank)
        reached += likelihood[rank] / total
    return nucleus


def expected_distribution(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:  # fmt: skip
    scaled = logits[:VOCABULARY_SIZE].astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[kept_ids(scaled[order], top_k=top_k, top_p=top_p, min_p=min_p)]
    distribution = np.zeros(WIDTH)
    distribution[kept] = np.exp(scaled[kept] - scaled.max())
    return distribution / distribution.sum()


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 100},
        {"top_p": 1e-6},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"min_p": 1.0},
        {"temperature": 0.5, "min_p": 0.15},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 3, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_definition(filters: dict[str, Any]):
    logits = some_logits(1)[0]
    expected = expected_distribution(logits, **filters)
    tokens = draw(np.tile(logits, (DRAWS, 1)), options(DRAWS, **filters)).tokens
    counts = np.bincount(tokens, minlength=WIDTH)
    possible = expected > 0
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(possible))
    wanted = expected[possible] * DRAWS
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum()
    freedom = possible.sum() - 1
    # Four standard deviations over its mean; the draws are always the same.
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


def test_top_p_counts_only_what_top_k_left():
    # Of these, the best two have 0.75 of the whole but 1 of what top_k leaves.
    logits = np.log([[0.5, 0.25, 0.125, 0.125]])
    tokens = draw(
        np.tile(logits, (256, 1)), options(256, top_k=2, top_p=0.6), vocabulary_size=4
    ).tokens
    assert set(tokens) == {0}


def test_greedy_takes_the_lowest_id_among_the_likeliest():
    logits = np.zeros((3, WIDTH))
    logits[1, [3, 7]] = 2.0
    logits[2, [VOCABULARY_SIZE - 1, VOCABULARY_SIZE]] = 2.0
    for mode in ("greedy", "unfiltered", "filtered"):
        tokens = draw(logits, options(3, temperature=0.0), mode=mode).tokens
        assert list(tokens) == [0, 3, VOCABULARY_SIZE - 1]


@pytest.mark.parametrize("mode", ["greedy", "unfiltered", "filtered"])
@pytest.mark.parametrize("beyond", [0.0, 1e30, np.inf, np.nan], ids=str)
def test_ids_at_and_above_the_vocabulary_are_never_chosen(mode: SamplingMode, beyond: float):
    logits = some_logits(256)
    logits[:, VOCABULARY_SIZE:] = beyond
    limits = np.finfo(np.float32)
    temperatures = np.resize(np.array([1.0, 0.0, limits.tiny, 1e30, limits.max]), 256)
    tokens = draw(logits, options(256, temperature=temperatures, top_k=100), mode=mode).tokens
    assert tokens.min() >= 0
    assert tokens.max() < VOCABULARY_SIZE


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform():
    logits = some_logits(DRAWS)
    best = logits[:, :VOCABULARY_SIZE].argmax(-1)
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    for mode in ("unfiltered", "filtered"):
        assert (draw(logits, options(DRAWS, temperature=tiny), mode=mode).tokens == best).all()
        tokens = draw(logits, options(DRAWS, temperature=huge), mode=mode).tokens
        counts = np.bincount(tokens, minlength=VOCABULARY_SIZE)
        expected = DRAWS / VOCABULARY_SIZE
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


@st.composite
def filters_of(draw_value: Any) -> tuple[np.ndarray, int, float, float]:
    # Few different values, so that ties are common.
    steps = draw_value(st.lists(st.sampled_from([0.0, 0.25, 1.0, 8.0]), min_size=7, max_size=7))
    ranked = -np.cumsum([0.0, *steps]).astype(np.float32)
    top_k = draw_value(st.sampled_from([0, 1, 2, 5, 8, 2**31 - 1]))
    top_p = draw_value(st.sampled_from([1e-30, 0.1, 0.33, 0.6, 0.9, 0.999, 1.0]))
    min_p = draw_value(st.sampled_from([0.0, 1e-30, 0.01, 0.3, 0.9, 1.0]))
    return ranked, top_k, top_p, min_p


# Their sums are exact, and the border of top_p falls between two of them.
FOUR_EQUALS = np.array([0, 0, 0, 0, -200, -200, -200, -200], np.float32)


@example((FOUR_EQUALS, 0, 0.5, 0.0))
@example((FOUR_EQUALS, 3, 1.0, 1.0))
@given(filters_of())
def test_keep_mask_is_the_textbook_loop(case: tuple[np.ndarray, int, float, float]):
    ranked, top_k, top_p, min_p = case
    kept = kept_ids(ranked, top_k=top_k, top_p=top_p, min_p=min_p)
    near = [kept_ids(ranked, top_k=top_k, top_p=top_p * s, min_p=min_p) for s in (0.999, 1.001)]
    assume(top_p in (0.5, 1.0) or near == [kept, kept])
    mask = jitted_keep_mask(
        jnp.asarray(ranked)[None], options(1, top_k=top_k, top_p=top_p, min_p=min_p)
    )
    assert list(np.flatnonzero(mask[0])) == kept


MIXED = {
    "temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 0.0, 1.0],
    "top_k": [0, 0, 3, 0, 0, 1, 5, 0],
    "top_p": [1.0, 1.0, 1.0, 0.8, 1.0, 0.5, 0.5, 1.0],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.1, 0.0],
    "step": [0, 1, 2, 3, 4, 5, 6, 7],
}


def mixed_rows() -> tuple[np.ndarray, SamplingArrays]:
    return some_logits(8), options(8, **MIXED)


def picked(arrays: SamplingArrays, rows: Any) -> SamplingArrays:
    return jax.tree.map(lambda column: column[jnp.asarray(rows)], arrays)


@pytest.mark.parametrize("rows", [[0], [5], [7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 2], [1] * 16])
def test_a_rows_token_does_not_depend_on_the_rest_of_the_batch(rows: list[int]):
    # Logits that are nearly flat, so that every row's noise decides.
    logits, arrays = mixed_rows()
    logits[:, :VOCABULARY_SIZE] *= 0.1
    together = draw(logits, arrays).tokens
    assert len(set(together)) > 3
    assert list(draw(logits[rows], picked(arrays, rows)).tokens) == list(together[rows])


def test_neutral_rows_get_the_same_token_in_every_mode():
    logits = some_logits(DRAWS)
    neutral = options(DRAWS)
    unfiltered = draw(logits, neutral, mode="unfiltered").tokens
    filtered = draw(logits, neutral, mode="filtered").tokens
    np.testing.assert_array_equal(unfiltered, filtered)


def test_every_part_of_seed_and_step_changes_the_draws():
    logits = np.zeros((64, WIDTH))
    low = [[0, row] for row in range(64)]
    high = [[row, 0] for row in range(64)]
    columns = [{"seed": low}, {"seed": high}, {"seed": [0, 1], "step": np.arange(64)}]
    draws = [tuple(draw(logits, options(64, **one)).tokens) for one in columns]
    assert all(len(set(tokens)) == VOCABULARY_SIZE for tokens in draws)
    assert len(set(draws)) == 3
    assert len(set(draw(logits, options(64, seed=[1, 2], step=3)).tokens)) == 1


def test_logprobs_are_of_the_raw_logits_over_all_of_them():
    logits = np.random.default_rng(1).normal(scale=3.0, size=(64, WIDTH)).astype(np.float32)
    expected = log_softmax(logits)
    by_temperature = [
        draw(logits, options(64, temperature=temperature, top_k=5), with_logprobs=True)
        for temperature in (0.3, 1.0)
    ]
    cold, warm = by_temperature
    same = cold.tokens == warm.tokens
    assert same.any() and not same.all()
    assert cold.token_logprobs is not None and warm.token_logprobs is not None
    np.testing.assert_array_equal(cold.token_logprobs[same], warm.token_logprobs[same])
    np.testing.assert_array_equal(cold.top_logprobs, warm.top_logprobs)
    for sampled in by_temperature:
        assert sampled.token_logprobs is not None
        of_tokens = np.take_along_axis(expected, np.asarray(sampled.tokens)[:, None], -1)[:, 0]
        np.testing.assert_allclose(sampled.token_logprobs, of_tokens, atol=1e-5)


def test_top_logprobs_are_best_first_without_ids_beyond_the_vocabulary():
    logits = some_logits(16)
    sampled = draw(logits, options(16), with_logprobs=True)
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    order = np.argsort(-logits[:, :VOCABULARY_SIZE], axis=-1, kind="stable")
    np.testing.assert_array_equal(sampled.top_ids, order)
    expected = np.take_along_axis(log_softmax(logits), order, -1)
    np.testing.assert_allclose(sampled.top_logprobs, expected, rtol=1e-5)


def test_a_tokens_logprob_is_the_same_number_in_both_places():
    # Clients compare them as exact floats.
    sampled = draw(some_logits(64), options(64), with_logprobs=True)
    place = np.nonzero(sampled.top_ids == sampled.tokens[:, None])
    assert sampled.top_logprobs is not None
    np.testing.assert_array_equal(sampled.top_logprobs[place], sampled.token_logprobs)


def test_at_most_twenty_top_logprobs():
    sampled = draw(np.zeros((1, 40)), options(1), with_logprobs=True, vocabulary_size=30)
    assert sampled.top_ids is not None
    assert list(sampled.top_ids[0]) == list(range(20))


def test_without_logprobs_there_are_none():
    sampled = draw(some_logits(2), options(2))
    assert sampled.token_logprobs is sampled.top_ids is sampled.top_logprobs is None
