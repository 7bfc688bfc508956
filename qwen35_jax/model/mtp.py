"""The multi-token prediction layer: from a token and the state behind it, the token after next.

    y = fc(concat[rms(embed(x_{t+1})), rms(h_t)])      h_t: the model's final norm output at t
    y = one full-attention decoder layer, with its own KV cache, at position t
    logits = unembed(rms(y))                           predict x_{t+2}

Embedding and head are the model's own.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.cache import AttentionCache, init_attention_cache
from qwen35_jax.model.decoder_layer import DecoderLayer, place_tokens
from qwen35_jax.model.layers import Array, linear, parameter, rms_norm, value_of

if TYPE_CHECKING:
    from qwen35_jax.model.transformer import Qwen35


class MultiTokenPredictor(nnx.Module):
    """fc: [2 D, D], its first half for the embedding."""

    def __init__(self, config: ModelConfig):
        self.config = config
        width = config.hidden_size
        self.embedding_norm = parameter((width,), config.dtype)
        self.hidden_norm = parameter((width,), config.dtype)
        self.fc = parameter((2 * width, width), config.dtype)
        self.layer = DecoderLayer(config, "full_attention")
        self.norm = parameter((width,), config.dtype)


def predict_hidden(
    params: "Qwen35",
    hidden: Array,
    next_ids: Array,
    cache: AttentionCache | None = None,
    position: Array | None = None,
) -> tuple[Array, AttentionCache]:
    """Run `params.mtp` after hidden [B, T, D] and next_ids [B, T], the token after each of them.

    Returns [B, T, D] for `unembed`, and the layer's new cache.

    cache and position [B]: the layer's own, of the positions before; None starts afresh with room
    for these T.
    """
    config, predictor = params.config, params.mtp
    batch, length = next_ids.shape
    if cache is None or position is None:
        cache = init_attention_cache(config, batch, length)
        position = jnp.zeros((batch,), jnp.int32)
    embedded = jnp.take(value_of(params.embed), next_ids, axis=0)
    joined = jnp.concatenate(
        [
            rms_norm(embedded, value_of(predictor.embedding_norm), config.rms_norm_eps),
            rms_norm(hidden, value_of(predictor.hidden_norm), config.rms_norm_eps),
        ],
        axis=-1,
    )
    x = linear(joined, value_of(predictor.fc))
    x, new_cache = predictor.layer(x, cache, place_tokens(config, position, length))
    assert isinstance(new_cache, AttentionCache)
    return rms_norm(x, value_of(predictor.norm), config.rms_norm_eps), new_cache
