"""What a sequence leaves behind for its next token: the model state, an explicit pytree.

    ModelState
      position   [B] int32                  tokens seen so far by each row
      layers     one entry a layer, in order
        AttentionCache  keys, values        [B, S, G, K] model dtype; S is the capacity in tokens
        DeltaNetState   recurrent           [B, H, K, V] float32
                        window              [B, W - 1, C] model dtype; the convolution's last inputs

Every leaf's first axis is the batch. Arrays never change in place from the caller's view, so that a
state is forked by keeping it, and `jax.tree.map(lambda leaf: leaf[rows], state)` selects, repeats
or reorders rows. A sequence is resumed by passing its state to the next `prefill` or `decode`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from qwen35_jax.config import ModelConfig

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionCache:
    """Keys (normed and turned by RoPE) and values of one full-attention layer: [B, S, G, K]."""

    keys: Array
    values: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaNetState:
    """One delta layer: recurrent [B, H, K, V] float32 and the convolution window [B, W - 1, C]."""

    recurrent: Array
    window: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelState:
    """All layers' state of a batch. See the module docstring for shapes."""

    position: Array
    layers: tuple[AttentionCache | DeltaNetState, ...]


def init_state(config: ModelConfig, batch: int, capacity: int) -> ModelState:
    """The state of `batch` sequences before their first token, with room for `capacity` tokens."""
    dtype = jnp.dtype(config.dtype)

    def layer(layer_type: str) -> AttentionCache | DeltaNetState:
        if layer_type == "full_attention":
            return init_attention_cache(config, batch, capacity)
        return DeltaNetState(
            recurrent=jnp.zeros(
                (
                    batch,
                    config.linear_num_value_heads,
                    config.linear_key_head_dim,
                    config.linear_value_head_dim,
                ),
                jnp.float32,
            ),
            window=jnp.zeros(
                (batch, config.linear_conv_kernel_dim - 1, config.linear_conv_dim), dtype
            ),
        )

    return ModelState(
        position=jnp.zeros((batch,), jnp.int32),
        layers=tuple(layer(layer_type) for layer_type in config.layer_types),
    )


def init_attention_cache(config: ModelConfig, batch: int, capacity: int) -> AttentionCache:
    """An empty cache of one full-attention layer."""
    shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
    dtype = jnp.dtype(config.dtype)
    return AttentionCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def state_bytes(config: ModelConfig, batch: int, capacity: int) -> int:
    """Device memory that `init_state` of the same arguments takes."""
    shapes = jax.eval_shape(lambda: init_state(config, batch, capacity))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
