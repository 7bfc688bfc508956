"""One decoder layer, and where a call's new tokens stand, which all layers share."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import LayerType, ModelConfig
from qwen35_jax.model.attention import GatedAttention
from qwen35_jax.model.cache import AttentionCache, DeltaNetState
from qwen35_jax.model.delta_net import GatedDeltaNet
from qwen35_jax.model.layers import MLP, Array, parameter, rms_norm, rope_tables, value_of


@dataclass(frozen=True)
class Tokens:
    """Where a call's new tokens stand, the same for every layer.

    positions: [B, T] int32. valid: [B, T] bool, false for padding. lengths: [B] int32, each row's
    valid tokens, or None when all are. rope: the tables of rope_tables.
    """

    positions: Array
    valid: Array
    lengths: Array | None
    rope: tuple[Array, Array]


def place_tokens(
    config: ModelConfig, position: Array, length: int, lengths: Array | None = None
) -> Tokens:
    """`length` tokens a row after `position` [B]."""
    steps = jnp.arange(length)
    positions = position[:, None] + steps
    valid = steps < (length if lengths is None else lengths[:, None])
    valid = jnp.broadcast_to(valid, positions.shape)
    return Tokens(positions, valid, lengths, rope_tables(positions, config))


class DecoderLayer(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the residual stream is in the model's dtype."""

    def __init__(self, config: ModelConfig, layer_type: LayerType):
        self.config = config
        self.input_norm = parameter((config.hidden_size,), config.dtype)
        self.mixer = (
            GatedAttention(config) if layer_type == "full_attention" else GatedDeltaNet(config)
        )
        self.mlp_norm = parameter((config.hidden_size,), config.dtype)
        self.mlp = MLP(config)

    def __call__(
        self,
        x: Array,
        state: AttentionCache | DeltaNetState,
        tokens: Tokens,
    ) -> tuple[Array, AttentionCache | DeltaNetState]:
        """x: [B, T, D] -> [B, T, D] and the layer's new state."""
        epsilon = self.config.rms_norm_eps
        h = rms_norm(x, value_of(self.input_norm), epsilon)
        if isinstance(self.mixer, GatedAttention):
            assert isinstance(state, AttentionCache)
            h, state = self.mixer(h, state, tokens.positions, tokens.valid, tokens.rope)
        else:
            assert isinstance(state, DeltaNetState)
            h, state = self.mixer(h, state, tokens.valid, tokens.lengths)
        x = add(x, h)
        return add(x, self.mlp(rms_norm(x, value_of(self.mlp_norm), epsilon))), state


def add(x: Array, y: Array) -> Array:
    """The residual sum, rounded to the residual stream's dtype."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
