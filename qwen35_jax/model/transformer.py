"""The Qwen3.5 text model: a Flax module that holds the parameters, and pure functions over it.

`Qwen35(config)` is a pytree whose leaves are arrays, so that it is itself the `params` of
`forward`, `prefill` and `decode`: they can be jitted, differentiated and mapped as they are.

    logits = jax.jit(forward)(params, ids)
    state = init_state(params.config, batch=1, capacity=1024)
    logits, state = prefill(params, ids, state)
    logits, state = decode(params, logits.argmax(-1), state)
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.cache import AttentionCache, DeltaNetState, ModelState, init_state
from qwen35_jax.model.decoder_layer import DecoderLayer, place_tokens
from qwen35_jax.model.layers import Array, dot_float32, parameter, rms_norm, rounded, value_of
from qwen35_jax.model.mtp import MultiTokenPredictor


class Qwen35(nnx.Module):
    """Parameters of the text model. Built abstract (shapes and dtypes), filled by a loader.

    embed: [vocab_size, D], also the head when it is tied; head: [vocab_size, D] otherwise.
    mtp: the multi-token prediction layer, when asked for; `predict_hidden` runs it.
    """

    def __init__(self, config: ModelConfig, *, mtp: bool = False):
        self.config = config
        self.embed = parameter((config.vocab_size, config.hidden_size), config.dtype)
        self.layers = nnx.List([DecoderLayer(config, kind) for kind in config.layer_types])
        self.norm = parameter((config.hidden_size,), config.dtype)
        if not config.tie_word_embeddings:
            self.head = parameter((config.vocab_size, config.hidden_size), config.dtype)
        if mtp:
            self.mtp = MultiTokenPredictor(config)


def forward(params: Qwen35, ids: Array) -> Array:
    """ids: [B, T] int -> logits at every position, [B, T, vocab_size] float32.

    An id outside [0, vocab_size) makes its row NaN. Raises ValueError for other shapes.
    """
    if jnp.ndim(ids) != 2:
        raise ValueError(f"ids must be [batch, length] integers, not of shape {jnp.shape(ids)}")
    state = init_state(params.config, *ids.shape)
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
    check_shapes(ids, state)
    tokens = place_tokens(params.config, state.position, ids.shape[1], lengths)
    x = jnp.take(value_of(params.embed), ids, axis=0)
    new_layers: list[AttentionCache | DeltaNetState] = []
    for layer, layer_state in zip(params.layers, state.layers, strict=True):
        x, layer_state = layer(x, layer_state, tokens)
        new_layers.append(layer_state)
    hidden = rms_norm(x, value_of(params.norm), params.config.rms_norm_eps)
    advance = ids.shape[1] if lengths is None else lengths
    return hidden, ModelState(position=state.position + advance, layers=tuple(new_layers))


def check_shapes(ids: Array, state: ModelState) -> None:
    """Raise ValueError for ids that don't fit the state. Positions are known on the device alone:
    that a state has room for what came before as well is the caller's part."""
    if jnp.ndim(ids) != 2 or not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise ValueError(
            f"ids must be [batch, length] integers, not {jnp.shape(ids)} {jnp.result_type(ids)}"
        )
    batch, length = jnp.shape(ids)
    if batch != state.position.shape[0]:
        raise ValueError(f"ids have {batch} rows, the state has {state.position.shape[0]}")
    for layer in state.layers:
        if isinstance(layer, AttentionCache) and length > layer.keys.shape[1]:
            raise ValueError(f"{length} tokens don't fit a state of capacity {layer.keys.shape[1]}")


def unembed(params: Qwen35, hidden: Array) -> Array:
    """hidden: [..., D] -> logits [..., vocab_size] float32."""
    head = params.embed if params.config.tie_word_embeddings else params.head
    logits = dot_float32(hidden, value_of(head).T)
    return rounded(logits, params.config.dtype) if params.config.strict else logits


def parameter_count(params: Qwen35) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def parameter_bytes(params: Qwen35) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
