"""Gated DeltaNet: projections, a short causal convolution, the delta rule, a gated norm.

    q, k, v, z, b, a = x W_in
    q, k, v = silu(causal_conv(q, k, v))
    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    o = delta_rule(l2(q) K^-1/2, l2(k), v, g, beta)
    out = (rms(o) w silu(z)) W_out

B rows, T new tokens, H value heads (each key head serves H / key heads of them), K key dim, V value
dim, C convolution channels (all of q, k, v), W its width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.cache import DeltaNetState
from qwen35_jax.model.delta_rule import delta_rule
from qwen35_jax.model.layers import Array, linear, parameter, rms, rounded, value_of

L2_EPSILON = 1e-6


class GatedDeltaNet(nnx.Module):
    """into: [D, C + H V + 2 H] holds q, k, v (C channels), then z, b, a; conv: [C, W]."""

    def __init__(self, config: ModelConfig):
        self.config = config
        heads, values = config.linear_num_value_heads, config.linear_value_dim
        # The checkpoint keeps these two in float32; transformers rounds them with the rest.
        kept = config.dtype if config.strict else "float32"
        width = config.linear_conv_dim + values + 2 * heads
        self.into = parameter((config.hidden_size, width), config.dtype)
        self.conv = parameter((config.linear_conv_dim, config.linear_conv_kernel_dim), config.dtype)
        self.dt_bias = parameter((heads,), config.dtype)
        self.a_log = parameter((heads,), kept)
        self.norm = parameter((config.linear_value_head_dim,), kept)
        self.out = parameter((values, config.hidden_size), config.dtype)

    def __call__(
        self, x: Array, state: DeltaNetState, valid: Array, lengths: Array | None
    ) -> tuple[Array, DeltaNetState]:
        """x: [B, T, D], valid: [B, T] bool, lengths: [B] -> [B, T, D] and the new state.

        lengths counts each row's valid tokens (a prefix); None says that all are.
        """
        qkv, z, b, a = self.project(x)
        mixed, window = causal_conv(qkv, state.window, value_of(self.conv), lengths, self.config)
        inputs = self.rule_inputs(mixed, b, a, valid)
        out, recurrent = delta_rule(*inputs, state.recurrent)
        return self.finish(out, z), DeltaNetState(recurrent, window)

    def project(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """x: [..., D] -> the convolution's inputs [..., C], z [..., H V], b and a [..., H]."""
        channels, values = self.config.linear_conv_dim, self.config.linear_value_dim
        heads = self.config.linear_num_value_heads
        qkv, z, b, a = jnp.split(
            linear(x, value_of(self.into)),
            [channels, channels + values, channels + values + heads],
            axis=-1,
        )
        return qkv, z, b, a

    def rule_inputs(
        self, mixed: Array, b: Array, a: Array, valid: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """mixed: [..., C] float32, the convolution's outputs; valid: [...] bool -> q, k, v, g, beta
        of the delta rule, so that tokens that are not valid leave the state as it is."""
        config = self.config
        heads = config.linear_num_value_heads
        mixed = jnp.where(valid[..., None], mixed, 0.0)
        q, k, v = jnp.split(mixed, [config.linear_key_dim, 2 * config.linear_key_dim], axis=-1)
        q = l2_norm(self._by_head(q, config.linear_num_key_heads))
        k = l2_norm(self._by_head(k, config.linear_num_key_heads))
        v = self._by_head(v, heads)
        share = heads // config.linear_num_key_heads
        q = jnp.repeat(q * config.linear_key_head_dim**-0.5, share, axis=-2)
        k = jnp.repeat(k, share, axis=-2)

        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        if config.strict:
            beta = rounded(beta, config.dtype)
        rate = jnp.exp(value_of(self.a_log).astype(jnp.float32))
        bias = value_of(self.dt_bias).astype(jnp.float32)
        g = -rate * jax.nn.softplus(a.astype(jnp.float32) + bias)
        g, beta = (jnp.where(valid[..., None], gate, 0.0) for gate in (g, beta))
        return q, k, v, g, beta

    def finish(self, out: Array, z: Array) -> Array:
        """out: [..., H, V] float32, z: [..., H V] -> [..., D]."""
        gates = self._by_head(z.astype(jnp.float32), self.config.linear_num_value_heads)
        out = self._gated_norm(out, gates).astype(z.dtype)
        return linear(out.reshape(z.shape), value_of(self.out))

    def _by_head(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:-1], heads, -1)

    def _gated_norm(self, out: Array, z: Array) -> Array:
        """The plain-weight norm of each value head, then its gate. [B, T, H, V] float32."""
        weight = value_of(self.norm).astype(jnp.float32)
        if not self.config.strict:
            return rms(out, self.config.rms_norm_eps) * weight * jax.nn.silu(z)
        dtype = self.config.dtype
        normed = rounded(rms(rounded(out, dtype), self.config.rms_norm_eps), dtype)
        return rounded(normed * weight, dtype) * jax.nn.silu(z)


def causal_conv(
    x: Array, window: Array, weight: Array, lengths: Array | None, config: ModelConfig
) -> tuple[Array, Array]:
    """Depthwise convolution over time, then SiLU. The last tap meets the current token.

    x: [B, T, C]; window: [B, W - 1, C], the inputs before x; weight: [C, W].
    Returns [B, T, C] float32 (of values that the model's dtype holds) and the next window, taken
    from each row's last valid inputs.
    """
    length, width = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([window, x], axis=1)
    taps = weight.astype(jnp.float32)
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        out += inputs[:, tap : tap + length].astype(jnp.float32) * taps[:, tap]
    if config.strict:
        out = rounded(out, config.dtype)
    out = rounded(jax.nn.silu(out), config.dtype)
    if lengths is None:
        return out, inputs[:, length:]
    last = lengths[:, None] + jnp.arange(width - 1)
    return out, jnp.take_along_axis(inputs, last[..., None], axis=1)


def l2_norm(x: Array) -> Array:
    """x: [..., K] float32, divided by its length; epsilon is added to the sum of squares."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)
