"""The one table between checkpoint tensors and parameters, used both ways.

A checkpoint stores linear weights as [out, in], one projection a tensor. The model keeps them as
[in, out] and side by side where they share an input. Names here are bare: without the
`model.language_model.` (or `model.`) that files put before them.
"""

from dataclasses import dataclass
from typing import Literal

from qwen35_jax.config import LayerType, ModelConfig

Form = Literal["transposed", "as stored", "squeezed"]

LONG_PREFIX = "model.language_model."
SHORT_PREFIX = "model."
HEAD = "lm_head.weight"
MTP_PREFIX = "mtp."
# Parts of the multimodal checkpoint that are skipped where they aren't asked for.
SKIPPED_PREFIXES = {"model.visual.": "vision", MTP_PREFIX: "multi-token prediction"}


@dataclass(frozen=True)
class TensorSlot:
    """One checkpoint tensor and where it lives.

    path: the parameter, such as "layers.0.mlp.gate_up". form: how the stored tensor becomes the
    parameter's: transposed; as stored; or without its middle axis of 1. A parameter with several
    slots holds them side by side along its last axis, in table order.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    form: Form = "as stored"


def tensor_slots(config: ModelConfig, *, mtp: bool = False) -> list[TensorSlot]:
    """Every tensor of the text model, in the order that published files have them.

    mtp: those of the multi-token prediction layer too.
    """
    width = config.hidden_size
    slots = [TensorSlot("embed_tokens.weight", (config.vocab_size, width), "embed")]
    for index, layer_type in enumerate(config.layer_types):
        slots += _layer(config, layer_type, f"layers.{index}", f"layers.{index}")
    slots.append(TensorSlot("norm.weight", (width,), "norm"))
    if not config.tie_word_embeddings:
        slots.append(TensorSlot(HEAD, (config.vocab_size, width), "head"))
    return [*slots, *_mtp(config)] if mtp else slots


def _mtp(config: ModelConfig) -> list[TensorSlot]:
    width = config.hidden_size
    return [
        _linear("mtp.fc", width, 2 * width, "mtp.fc"),
        TensorSlot("mtp.pre_fc_norm_embedding.weight", (width,), "mtp.embedding_norm"),
        TensorSlot("mtp.pre_fc_norm_hidden.weight", (width,), "mtp.hidden_norm"),
        *_layer(config, "full_attention", "mtp.layers.0", "mtp.layer"),
        TensorSlot("mtp.norm.weight", (width,), "mtp.norm"),
    ]


def _layer(config: ModelConfig, layer_type: LayerType, stored: str, path: str) -> list[TensorSlot]:
    width = (config.hidden_size,)
    mixer = _attention if layer_type == "full_attention" else _delta_net
    return [
        TensorSlot(f"{stored}.input_layernorm.weight", width, f"{path}.input_norm"),
        *mixer(config, stored, f"{path}.mixer"),
        TensorSlot(f"{stored}.post_attention_layernorm.weight", width, f"{path}.mlp_norm"),
        *_mlp(config, stored, f"{path}.mlp"),
    ]


def _linear(name: str, out_dim: int, in_dim: int, path: str) -> TensorSlot:
    return TensorSlot(f"{name}.weight", (out_dim, in_dim), path, "transposed")


def _mlp(config: ModelConfig, layer: str, path: str) -> list[TensorSlot]:
    width, inner = config.hidden_size, config.intermediate_size
    return [
        _linear(f"{layer}.mlp.gate_proj", inner, width, f"{path}.gate_up"),
        _linear(f"{layer}.mlp.up_proj", inner, width, f"{path}.gate_up"),
        _linear(f"{layer}.mlp.down_proj", width, inner, f"{path}.down"),
    ]


def _attention(config: ModelConfig, layer: str, mixer: str) -> list[TensorSlot]:
    stored = f"{layer}.self_attn"
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    width = config.hidden_size
    return [
        _linear(f"{stored}.q_proj", 2 * queries, width, f"{mixer}.qkv"),
        _linear(f"{stored}.k_proj", keys, width, f"{mixer}.qkv"),
        _linear(f"{stored}.v_proj", keys, width, f"{mixer}.qkv"),
        TensorSlot(f"{stored}.q_norm.weight", (config.head_dim,), f"{mixer}.query_norm"),
        TensorSlot(f"{stored}.k_norm.weight", (config.head_dim,), f"{mixer}.key_norm"),
        _linear(f"{stored}.o_proj", width, queries, f"{mixer}.out"),
    ]


def _delta_net(config: ModelConfig, layer: str, mixer: str) -> list[TensorSlot]:
    stored = f"{layer}.linear_attn"
    width, heads = config.hidden_size, config.linear_num_value_heads
    channels, values = config.linear_conv_dim, config.linear_value_dim
    return [
        _linear(f"{stored}.in_proj_qkv", channels, width, f"{mixer}.into"),
        _linear(f"{stored}.in_proj_z", values, width, f"{mixer}.into"),
        _linear(f"{stored}.in_proj_b", heads, width, f"{mixer}.into"),
        _linear(f"{stored}.in_proj_a", heads, width, f"{mixer}.into"),
        TensorSlot(
            f"{stored}.conv1d.weight",
            (channels, 1, config.linear_conv_kernel_dim),
            f"{mixer}.conv",
            "squeezed",
        ),
        TensorSlot(f"{stored}.dt_bias", (heads,), f"{mixer}.dt_bias"),
        TensorSlot(f"{stored}.A_log", (heads,), f"{mixer}.a_log"),
        TensorSlot(f"{stored}.norm.weight", (config.linear_value_head_dim,), f"{mixer}.norm"),
        _linear(f"{stored}.out_proj", width, values, f"{mixer}.out"),
    ]


def bare_name(name: str) -> str | None:
    """The table's name of a stored tensor, or None where it isn't the text model's."""
    if name == HEAD or name.startswith(MTP_PREFIX):
        return name
    for prefix in (LONG_PREFIX, SHORT_PREFIX):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return None


def stored_name(name: str) -> str:
    """A table name as the published multimodal layout writes it."""
    return name if name == HEAD or name.startswith(MTP_PREFIX) else LONG_PREFIX + name


def skipped_group(name: str) -> str | None:
    """The part of the checkpoint that a tensor belongs to when the text model skips it."""
    for prefix, group in SKIPPED_PREFIXES.items():
        if name.startswith(prefix):
            return group
    return None
