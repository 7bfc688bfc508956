"""Small hybrid models and their weights, from numpy alone.

The goldens were made from these same arrays, so a change to a shape, a seed or a scale here makes
tests/golden out of date: run make_goldens.py again.
"""

import copy
import zlib
from typing import Any, Literal

import numpy as np

Config = dict[str, Any]
LayerKind = Literal["linear_attention", "full_attention"]

REAL_INPUT_TOKENS = 66
REAL_INPUT_SEED = 66


def _text_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    mrope_section: list[int],
    full_attention_interval: int = 4,
    layer_types: list[str] | None = None,
) -> Config:
    if layer_types is None:
        layer_types = [
            "linear_attention" if (index + 1) % full_attention_interval else "full_attention"
            for index in range(layers)
        ]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": vocab_size - 1,
        "full_attention_interval": full_attention_interval,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": value_dim,
        "max_position_embeddings": 8192,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "use_cache": True,
        "vocab_size": vocab_size,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": mrope_section,
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }


def _nested(text: Config, *, tied: bool, tie_key_in_text: bool = True) -> Config:
    if tie_key_in_text:
        text = text | {"tie_word_embeddings": tied}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def _flat(text: Config, *, tied: bool) -> Config:
    return text | {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": tied}


def _interval_only(text: Config) -> Config:
    return {key: value for key, value in text.items() if key != "layer_types"}


# Widths are chosen to differ from each other (hidden from heads x head_dim, key from value), so
# that a swapped axis is a shape error and not a lucky pass.
TINY_CONFIGS: dict[str, Config] = {
    # The 0.8B and 2B pattern: one value head a key head, tied.
    "ratio1_tied": _nested(
        _text_config(
            vocab_size=64, hidden_size=64, intermediate_size=96, layers=8, heads=4, kv_heads=2,
            head_dim=32, key_heads=4, value_heads=4, key_dim=16, value_dim=16,
            mrope_section=[2, 1, 1],
        ),
        tied=True,
    ),
    # The 4B pattern: two value heads a key head, four query heads a kv head, tied.
    "ratio2_tied": _nested(
        _text_config(
            vocab_size=80, hidden_size=64, intermediate_size=112, layers=4, heads=8, kv_heads=2,
            head_dim=32, key_heads=2, value_heads=4, key_dim=16, value_dim=24,
            mrope_section=[2, 1, 1],
        ),
        tied=True,
    ),
    # The 27B pattern: three value heads a key head, untied, the tie key at top level only; the
    # explicit layer types contradict the interval and win.
    "ratio3_untied": _nested(
        _text_config(
            vocab_size=64, hidden_size=48, intermediate_size=80, layers=5, heads=3, kv_heads=1,
            head_dim=64, key_heads=2, value_heads=6, key_dim=32, value_dim=16,
            mrope_section=[3, 3, 2],
            layer_types=[
                "full_attention", "linear_attention", "linear_attention", "full_attention",
                "linear_attention",
            ],
        ),
        tied=False,
        tie_key_in_text=False,
    ),
    # A flat text config, no layer_types: the interval alone says which layers are full.
    "flat_interval3": _flat(
        _interval_only(
            _text_config(
                vocab_size=80, hidden_size=64, intermediate_size=96, layers=6, heads=2,
                kv_heads=2, head_dim=64, key_heads=1, value_heads=2, key_dim=24, value_dim=32,
                mrope_section=[3, 3, 2], full_attention_interval=3,
            )
        ),
        tied=False,
    ),
}  # fmt: skip


def text_config(config: Config) -> Config:
    """The text part of a nested or flat config, with `layer_types` and the tie key filled in."""
    text = copy.deepcopy(config.get("text_config", config))
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
    interval = text["full_attention_interval"]
    text.setdefault(
        "layer_types",
        [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(text["num_hidden_layers"])
        ],
    )
    return text


def layer_shapes(text: Config, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    """Name to shape of one layer's tensors, named within the layer; matrices are [out, in]."""
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if kind == "linear_attention":
        value_heads, value_head_dim = text["linear_num_value_heads"], text["linear_value_head_dim"]
        key_width = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        value_width = value_heads * value_head_dim
        channels = 2 * key_width + value_width
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (channels, hidden),
            "linear_attn.in_proj_z.weight": (value_width, hidden),
            "linear_attn.in_proj_b.weight": (value_heads, hidden),
            "linear_attn.in_proj_a.weight": (value_heads, hidden),
            "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
            "linear_attn.dt_bias": (value_heads,),
            "linear_attn.A_log": (value_heads,),
            "linear_attn.norm.weight": (value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, value_width),
        }
    else:
        head_dim = text["head_dim"]
        query_width = text["num_attention_heads"] * head_dim
        kv_width = text["num_key_value_heads"] * head_dim
        shapes |= {
            "self_attn.q_proj.weight": (2 * query_width, hidden),
            "self_attn.k_proj.weight": (kv_width, hidden),
            "self_attn.v_proj.weight": (kv_width, hidden),
            "self_attn.o_proj.weight": (hidden, query_width),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
        }
    return shapes | {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def text_tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name to shape of every text tensor, by bare name ("layers.0.mlp.up_proj.weight")."""
    text = text_config(config)
    vocabulary = (text["vocab_size"], text["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": vocabulary}
    for index, kind in enumerate(text["layer_types"]):
        shapes |= {f"layers.{index}.{name}": s for name, s in layer_shapes(text, kind).items()}
    shapes["norm.weight"] = (text["hidden_size"],)
    if not text["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def is_stored_float32(name: str) -> bool:
    """Whether the published checkpoint stores this tensor as F32; all others are BF16."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


def to_bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), to nearest even. Finite values only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 in, float32 out, each value the nearest bfloat16."""
    return from_bfloat16_bits(to_bfloat16_bits(array))


def tiny_weights(config: Config) -> dict[str, np.ndarray]:
    """float32 weights for every name of `text_tensor_shapes`.

    All values are bfloat16 values, so a float32 and a bfloat16 run share them; only those of
    `is_stored_float32` need their full float32 precision. The values depend on names and shapes
    alone: a config with other shapes, or with other layer types, gets other weights.
    """
    shapes = text_tensor_shapes(config)
    return _weights(shapes, seed=zlib.crc32(repr(sorted(shapes.items())).encode()))


def real_layer_config() -> Config:
    """A nested config with the 4B model's layer sizes; four layers and a small vocabulary."""
    text = _text_config(
        vocab_size=512, hidden_size=2560, intermediate_size=9216, layers=4, heads=16, kv_heads=4,
        head_dim=256, key_heads=16, value_heads=32, key_dim=128, value_dim=128,
        mrope_section=[11, 11, 10],
    )  # fmt: skip
    return _nested(text, tied=True)


def real_layer_weights(kind: LayerKind) -> dict[str, np.ndarray]:
    """float32 weights of one layer at 4B size (about 450 MB), named within the layer."""
    shapes = layer_shapes(text_config(real_layer_config()), kind)
    return _weights(shapes, seed=zlib.crc32(kind.encode()))


def real_layer_input() -> np.ndarray:
    """The residual stream that enters the real-size layers: [66, 2560] float32, bf16 values."""
    stream = np.random.RandomState(REAL_INPUT_SEED)
    hidden = real_layer_config()["text_config"]["hidden_size"]
    return round_to_bfloat16(stream.standard_normal((REAL_INPUT_TOKENS, hidden)))


def golden_ids(config: Config, length: int) -> np.ndarray:
    """The fixed prompt of a config: int64 [length]; a shorter one is a prefix of a longer one."""
    vocab_size = text_config(config)["vocab_size"]
    return np.random.RandomState(vocab_size).randint(0, vocab_size, size=1024)[:length]


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    # One stream a tensor: adding or reordering tensors leaves the others as they are.
    return {
        name: _tensor(name, shape, np.random.RandomState(zlib.crc32(name.encode(), seed)))
        for name, shape in shapes.items()
    }


def _tensor(name: str, shape: tuple[int, ...], stream: np.random.RandomState) -> np.ndarray:
    normal = stream.standard_normal
    if name.endswith("A_log"):
        values = np.log(stream.uniform(0.5, 16.0, shape))
    elif name.endswith("dt_bias"):
        # Every other head decays slowly, so that state carried over a chunk border matters.
        values = normal(shape) - np.where(np.arange(shape[0]) % 2, 0.0, 5.0)
    elif name.endswith("linear_attn.norm.weight"):
        values = 1.0 + 0.3 * normal(shape)
    elif name.endswith("norm.weight"):
        values = 0.3 * normal(shape)
    elif name.endswith("conv1d.weight"):
        values = 0.5 * normal(shape)
    elif name == "embed_tokens.weight":
        values = 2.5 * shape[1] ** -0.5 * normal(shape)
    elif name == "lm_head.weight":
        values = 2.0 * shape[1] ** -0.5 * normal(shape)
    else:
        values = shape[1] ** -0.5 * normal(shape)
    values = values.astype(np.float32)
    return values if is_stored_float32(name) else round_to_bfloat16(values)
