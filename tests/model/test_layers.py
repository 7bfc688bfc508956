"""Norms, rounding, RoPE and the MLP against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.layers import (
    MLP,
    apply_rope,
    dot_float32,
    linear,
    rms_norm,
    rms_norm_float32,
    rope_tables,
    rounded,
)
from tests.support.models import relative_error, tiny_config, tiny_params
from tests.support.published_configs import published_config
from tests.support.tiny_models import round_to_bfloat16


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_norm_weight_is_an_offset_from_one() -> None:
    x, offset = jnp.asarray(_normal(3, 16)), 0.3 * jnp.asarray(_normal(16, seed=1))
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    assert relative_error(rms_norm(x, offset, 1e-6), normed * (1 + np.asarray(offset))) <= 1e-6
    assert relative_error(rms_norm(x, jnp.zeros_like(offset), 1e-6), normed) <= 1e-6


def test_norm_offset_is_added_in_float32() -> None:
    x = jnp.asarray(_normal(4, 64), jnp.bfloat16)
    # 1 + 2^-9 is not a bfloat16 number: in bfloat16 the offset would be lost.
    offset = jnp.full((64,), 2.0**-9, jnp.bfloat16)
    with_offset = rms_norm_float32(x, offset, 1e-6)
    without = rms_norm_float32(x, jnp.zeros_like(offset), 1e-6)
    assert relative_error(with_offset, np.asarray(without) * (1 + 2.0**-9)) <= 1e-6
    assert rms_norm(x, offset, 1e-6).dtype == jnp.bfloat16


def test_norm_of_zeros_is_zero() -> None:
    np.testing.assert_array_equal(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6), np.zeros((2, 8)))


def test_rounded_is_bfloat16_inside_a_compiled_function() -> None:
    x = _normal(1000)
    out = jax.jit(lambda x: rounded(x, "bfloat16") * 1.0)(x)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, round_to_bfloat16(x))
    np.testing.assert_array_equal(rounded(jnp.asarray(x), "float32"), x)


def test_bfloat16_products_are_summed_in_float32() -> None:
    # 256 + 1 is not a bfloat16 number; the sum of 256 and 512 ones is 768.
    x = jnp.ones((1, 513), jnp.bfloat16)
    weight = jnp.ones((513, 1), jnp.bfloat16).at[0].set(256)
    assert dot_float32(x, weight).dtype == jnp.float32
    assert float(dot_float32(x, weight)[0, 0]) == 768
    assert linear(x, weight).dtype == jnp.bfloat16


@pytest.fixture(scope="module")
def published() -> ModelConfig:
    return ModelConfig.from_dict(published_config("4B")).replace(dtype="float32")


def test_rope_turns_pairs_half_the_rotary_width_apart(published: ModelConfig) -> None:
    head_dim, half = published.head_dim, published.rotary_dim // 2
    assert half == 32
    positions = jnp.array([[0, 1, 7, 4097]])
    cos, sin = rope_tables(positions, published)
    assert cos.shape == (1, 4, 1, half)
    for index in (0, 1, 31):
        # A head that is 1 in one dimension shows where that dimension goes.
        x = jnp.zeros((1, 4, 1, head_dim)).at[..., index].set(1.0)
        turned = np.asarray(apply_rope(x, cos, sin, round_products_to="float32"))[0, :, 0]
        angle = np.array([0, 1, 7, 4097]) * 1e7 ** (-2 * index / 64)
        expected = np.zeros((4, head_dim))
        expected[:, index], expected[:, index + half] = np.cos(angle), np.sin(angle)
        # float32 holds an angle of 4,097 to 2.4e-4.
        np.testing.assert_allclose(turned, expected, atol=3e-4)


def test_rope_leaves_the_other_dimensions(published: ModelConfig) -> None:
    x = _normal(2, 5, 3, published.head_dim)
    positions = jnp.array([[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]])
    turned = apply_rope(
        jnp.asarray(x), *rope_tables(positions, published), round_products_to="float32"
    )
    rotary = published.rotary_dim
    assert rotary == 64
    np.testing.assert_array_equal(turned[..., rotary:], x[..., rotary:])
    np.testing.assert_array_equal(turned[0, 0], x[0, 0])
    assert np.all(np.asarray(turned[1, :, :, :4]) != x[1, :, :, :4])
    lengths = np.linalg.norm(turned, axis=-1)
    assert relative_error(lengths, np.linalg.norm(x, axis=-1)) <= 1e-6


def test_rope_scores_depend_on_distance_alone(published: ModelConfig) -> None:
    q, k = _normal(2, 1, 1, 1, published.head_dim)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rope(
                jnp.asarray(x),
                *rope_tables(jnp.array([[position]]), published),
                round_products_to="float32",
            )
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float(jnp.vdot(*turned))

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(4, 9), rel=1e-2)


def test_rope_tables_are_rounded_to_the_models_dtype(published: ModelConfig) -> None:
    positions = jnp.arange(50)[None]
    wide = rope_tables(positions, published)
    for table, exact in zip(
        rope_tables(positions, published.replace(dtype="bfloat16")), wide, strict=True
    ):
        assert table.dtype == jnp.float32
        np.testing.assert_array_equal(table, round_to_bfloat16(np.asarray(exact)))


def test_mlp_gates_the_second_half_with_the_first() -> None:
    mlp: MLP = tiny_params("ratio2_tied").layers[0].mlp
    config = tiny_config("ratio2_tied")
    x = _normal(1, 3, config.hidden_size)
    gate_up = x.astype(np.float64) @ np.asarray(mlp.gate_up[...], np.float64)
    gate, up = np.split(gate_up, 2, axis=-1)
    expected = gate / (1 + np.exp(-gate)) * up @ np.asarray(mlp.down[...], np.float64)
    assert relative_error(mlp(jnp.asarray(x)), expected) <= 1e-5
