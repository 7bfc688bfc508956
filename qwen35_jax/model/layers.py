"""The small pieces both layer kinds share: linear maps, norms, RoPE, the MLP.

Weights of linear maps are [in, out]. Arithmetic is float32 with explicit rounding: `rounded` marks
each place where a value becomes bfloat16 although the computation goes on in float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import ModelConfig

Array = jax.Array


def parameter(shape: tuple[int, ...], dtype: str) -> nnx.Param:
    """A parameter known by shape and dtype alone, until a checkpoint or initialiser fills it."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def value_of(param: nnx.Param) -> Array:
    return param[...]


def rounded(x: Array, dtype: str) -> Array:
    """float32 `x` rounded to what `dtype` can hold, still as float32.

    A cast there and back would be removed by XLA, which may keep excess precision.
    """
    if dtype == "float32":
        return x
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def linear(x: Array, weight: Array) -> Array:
    """x: [..., in], weight: [in, out], one dtype -> [..., out] of it, accumulated in float32."""
    return dot_float32(x, weight).astype(x.dtype)


def dot_float32(x: Array, weight: Array) -> Array:
    """x: [..., in], weight: [in, out] -> [..., out] float32; true float32 products, never TF32."""
    return jnp.dot(
        x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def rms(x: Array, epsilon: float) -> Array:
    """x: [..., D] float32, divided by its root mean square over D."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def rms_norm_float32(x: Array, offset: Array, epsilon: float) -> Array:
    """The zero-centred RMS norm: the stored weight is an offset from one. Result in float32."""
    return rms(x.astype(jnp.float32), epsilon) * (1.0 + offset.astype(jnp.float32))


def rms_norm(x: Array, offset: Array, epsilon: float) -> Array:
    """x: [..., D] -> [..., D] of the same dtype, rounded once."""
    return rms_norm_float32(x, offset, epsilon).astype(x.dtype)


def rope_tables(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """positions: [B, T] int32 -> cos and sin [B, T, 1, rotary_dim / 2] float32.

    Rounded to the model's dtype, as every engine the model is served with rounds them.
    """
    exponents = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    frequencies = 1.0 / jnp.float32(config.rope_theta) ** exponents
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return rounded(jnp.cos(angles), config.dtype), rounded(jnp.sin(angles), config.dtype)


def apply_rope(x: Array, cos: Array, sin: Array, *, round_products_to: str) -> Array:
    """x: [B, T, H, K] float32; turns pairs (i, i + rotary_dim / 2), leaves the rest. Float32."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]

    def product(a: Array, b: Array) -> Array:
        return rounded(a * b, round_products_to)

    turned_first = product(first, cos) - product(second, sin)
    turned_second = product(second, cos) + product(first, sin)
    return jnp.concatenate([turned_first, turned_second, rest], axis=-1)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). gate_up: [D, 2 I] holds gate, then up; down: [I, D]."""

    def __init__(self, config: ModelConfig):
        self.config = config
        width = config.intermediate_size
        self.gate_up = parameter((config.hidden_size, 2 * width), config.dtype)
        self.down = parameter((width, config.hidden_size), config.dtype)

    def __call__(self, x: Array) -> Array:
        """x: [B, T, D] -> [B, T, D]."""
        gate_up = linear(x, value_of(self.gate_up)).astype(jnp.float32)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        gate = jax.nn.silu(gate)
        if self.config.strict:
            gate = rounded(gate, self.config.dtype)
        return linear((gate * up).astype(x.dtype), value_of(self.down))
