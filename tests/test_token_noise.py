"""The random numbers of sampling: whose they are, and how they are distributed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.token_noise import gumbel_noise, gumbel_of_bits, threefry

WORDS = jnp.array([0, 1, 2**31, 2**32 - 1, 123456789], jnp.uint32)


def test_threefry_is_the_one_of_jax():
    for high, low in ((0, 0), (3, 4), (2**32 - 1, 2**31)):
        key = jax.random.wrap_key_data(jnp.array([high, low], jnp.uint32), impl="threefry2x32")
        expected = jax.vmap(lambda word, key=key: jax.random.fold_in(key, word))(WORDS)
        found = threefry((jnp.uint32(high), jnp.uint32(low)), (jnp.zeros_like(WORDS), WORDS))
        np.testing.assert_array_equal(jnp.stack(found, -1), jax.random.key_data(expected))


def noise(seed: list[list[int]], step: list[int], ids: list[list[int]]) -> np.ndarray:
    arrays = jnp.array(seed, jnp.uint32), jnp.array(step, jnp.int32), jnp.array(ids, jnp.int32)
    return np.asarray(gumbel_noise(*arrays))


def test_a_number_is_its_seeds_steps_and_ids_alone():
    whole = noise([[1, 2], [1, 3]], [5, 5], [[*range(8)]] * 2)
    some = noise([[1, 3]], [5], [[7, 0, 3]])
    np.testing.assert_allclose(some, whole[1:, [7, 0, 3]], rtol=1e-6)


def test_every_part_of_seed_step_and_id_counts():
    rows = [([0, 0], 0), ([0, 1], 0), ([1, 0], 0), ([0, 0], 1), ([0, 0], 256)]
    values = noise([seed for seed, _ in rows], [step for _, step in rows], [[0, 1, 2**20]] * 5)
    assert len(np.unique(values)) == values.size


def test_the_noise_is_gumbels():
    values = noise(
        [[0, row] for row in range(64)], [row % 7 for row in range(64)], [[*range(512)]] * 64
    )
    uniform = np.exp(-np.exp(-values.astype(np.float64)))
    counts, _ = np.histogram(uniform, bins=64, range=(0, 1))
    wanted = values.size / 64
    assert ((counts - wanted) ** 2 / wanted).sum() <= 63 + 4 * np.sqrt(2 * 63)


@pytest.mark.parametrize(
    ("high", "low", "expected"),
    [(0, 0, 65 * np.log(2)), (0, 2**31, 33 * np.log(2)), (1, 0, 32 * np.log(2)),
     (2**31, 0, -np.log(np.log(2)))],
)  # fmt: skip
def test_small_uniforms_keep_all_their_bits(high: int, low: int, expected: float):
    found = gumbel_of_bits(jnp.uint32(high), jnp.uint32(low))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_smallest_noise_is_finite():
    ones = jnp.uint32(2**32 - 1)
    assert -3.0 < float(gumbel_of_bits(ones, ones)) < -2.5
