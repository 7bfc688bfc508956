"""The Qwen3.5 text model: a Flax module that holds the parameters, and pure functions over it.

`Qwen35(config)` is a pytree whose leaves are arrays, so that it is itself the `params` of
`forward`, `prefill` and `decode`: they can be jitted, differentiated and mapped as they are.

    logits = jax.jit(forward)(params, ids)
    state = init_state(params.config, batch=1, capacity=1024)
    logits, state = prefill(params, ids, state)
    logits, state = decode(params, logits.argmax(-1), state)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import LayerType, ModelConfig
from qwen35_jax.model.attention import GatedAttention
from qwen35_jax.model.cache import (
    AttentionCache,
    DeltaNetState,
    ModelState,
    init_state,
)
from qwen35_jax.model.delta_net import GatedDeltaNet
from qwen35_jax.model.layers import (
    MLP,
    Array,
    dot_float32,
    parameter,
    rms_norm,
    rope_tables,
    rounded,
    value_of,
)


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


class Qwen35(nnx.Module):
    """Parameters of the text model. Built abstract (shapes and dtypes), filled by a loader.

    embed: [vocab_size, D], also the head when it is tied; head: [vocab_size, D] otherwise.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = parameter((config.vocab_size, config.hidden_size), config.dtype)
        self.layers = nnx.List([DecoderLayer(config, kind) for kind in config.layer_types])
        self.norm = parameter((config.hidden_size,), config.dtype)
        if not config.tie_word_embeddings:
            self.head = parameter((config.vocab_size, config.hidden_size), config.dtype)


def forward(params: Qwen35, ids: Array) -> Array:
    """ids: [B, T] int -> logits at every position, [B, T, vocab_size] float32."""
    batch, length = ids.shape
    state = init_state(params.config, batch, length)
    hidden, _ = hidden_states(params, ids, state)
    return unembed(params, hidden)


def prefill(
    params: Qwen35, ids: Array, state: ModelState, *, lengths: Array | None = None
) -> tuple[Array, ModelState]:
    """Run tokens after what `state` has seen.

    ids: [B, T] int. lengths: [B] int, each row's true number of tokens (1 to T) when rows are
    padded at their end; None says that all are T. `state` must have room for them.
    Returns the logits after each row's last token, [B, vocab_size] float32, and the new state.
    """
    hidden, state = hidden_states(params, ids, state, lengths=lengths)
    if lengths is None:
        last = hidden[:, -1]
    else:
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return unembed(params, last), state


def decode(params: Qwen35, token: Array, state: ModelState) -> tuple[Array, ModelState]:
    """token: [B] int, one a row -> logits [B, vocab_size] float32 and the new state."""
    return prefill(params, token[:, None], state)


def hidden_states(
    params: Qwen35, ids: Array, state: ModelState, *, lengths: Array | None = None
) -> tuple[Array, ModelState]:
    """As `prefill`, but returns the final norm's output at every position, [B, T, D]."""
    tokens = place_tokens(params.config, state.position, ids.shape[1], lengths)
    x = jnp.take(value_of(params.embed), ids, axis=0)
    new_layers: list[AttentionCache | DeltaNetState] = []
    for layer, layer_state in zip(params.layers, state.layers, strict=True):
        x, layer_state = layer(x, layer_state, tokens)
        new_layers.append(layer_state)
    hidden = rms_norm(x, value_of(params.norm), params.config.rms_norm_eps)
    advance = ids.shape[1] if lengths is None else lengths
    return hidden, ModelState(position=state.position + advance, layers=tuple(new_layers))


def add(x: Array, y: Array) -> Array:
    """The residual sum, rounded to the residual stream's dtype."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


def unembed(params: Qwen35, hidden: Array) -> Array:
    """hidden: [..., D] -> logits [..., vocab_size] float32."""
    head = params.embed if params.config.tie_word_embeddings else params.head
    logits = dot_float32(hidden, value_of(head).T)
    return rounded(logits, params.config.dtype) if params.config.strict else logits


def parameter_count(params: Qwen35) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def parameter_bytes(params: Qwen35) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
