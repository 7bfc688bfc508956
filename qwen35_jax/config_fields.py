"""Reads the fields of a checkpoint's config.json, and refuses by name what isn't implemented.

Every function takes parsed JSON, of whatever types a file may hold, and raises ConfigError alone.
`fields` is the whole file; `text` its text_config, or the same again where the file is flat.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen35_jax.errors import ConfigError

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")

# Copied from text_config as they are, under the same name.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)

# A slip in num_hidden_layers must not fill the memory.
_MOST_LAYERS = 1000
_LARGEST_INTEGER = 2**31 - 1
# Any JSON may stand in a message, at whatever length and depth: it is cut short.
shown = reprlib.Repr(maxstring=80, maxother=80, maxlist=8).repr

# text_config fields whose other values mean a model that this engine doesn't implement.
_ONLY_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "attn_output_gate": (True, None),
    "hidden_act": ("silu", None),
    "mlp_only_layers": ([], None),
    "num_experts": (0, None),
    "num_experts_per_tok": (0, None),
    "num_local_experts": (0, None),
    "linear_conv_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "compression_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
    "mamba_ssm_dtype": ("float32", None),
}


def refuse_unsupported(fields: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """ConfigError for quantised weights, another architecture or a variant of this one."""
    for level in (fields, text):
        if level.get("quantization_config") is not None:
            method: object = "unknown"
            if isinstance(level["quantization_config"], Mapping):
                method = level["quantization_config"].get("quant_method", "unknown")
            raise ConfigError(
                f"quantization_config: quant_method {_bare(method)} is not supported; "
                "use the bfloat16 checkpoint"
            )
    for level in (fields, text):
        model_type = level.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type {shown(model_type)} is not supported; "
                f"want one of {', '.join(MODEL_TYPES)}"
            )
        for name, values in _ONLY_VALUE.items():
            if name in level and level[name] not in values:
                raise ConfigError(
                    f"{name} = {shown(level[name])} is not supported (only {values[0]!r} is)"
                )


def read_layer_types(text: Mapping[str, Any]) -> tuple[Any, ...]:
    """One entry a layer, of any type: the list, or else what full_attention_interval says."""
    count = required(text, "num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers must be at most {_MOST_LAYERS}, not {count}")
    given = text.get("layer_types")
    if given is None:
        interval = positive_integer(
            "full_attention_interval", text.get("full_attention_interval", 4)
        )
        return tuple(
            "full_attention" if (index + 1) % interval == 0 else "linear_attention"
            for index in range(count)
        )
    if not isinstance(given, list) or len(given) != count:
        raise ConfigError(
            f"layer_types must list one type a layer: num_hidden_layers is {count}, "
            f"layer_types has {len(given) if isinstance(given, list) else shown(given)}"
        )
    return tuple(given)


def read_rope(text: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    """RoPE's base and how many dimensions it turns. M-RoPE is plain RoPE for text."""
    rope = text.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": text.get("rope_theta"), "rope_type": "default"}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters must be an object, not {shown(rope)}")
    for name in ("rope_type", "type"):
        if rope.get(name, "default") != "default":
            raise ConfigError(
                f"rope_parameters.{name} = {shown(rope[name])}: RoPE scaling is not supported"
            )
    known = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    for name in rope:
        if name not in (*known, "mrope_interleaved", "mrope_section"):
            raise ConfigError(f"rope_parameters.{_bare(name)} is not supported")
    for name in ("rope_theta", "partial_rotary_factor"):
        if None not in (outside := text.get(name), inside := rope.get(name)) and outside != inside:
            raise ConfigError(
                f"{name} = {shown(outside)} contradicts rope_parameters.{name} = {shown(inside)}"
            )
    theta = positive_number("rope_parameters.rope_theta", rope.get("rope_theta"))
    factor = positive_number(
        "partial_rotary_factor",
        rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)),
    )
    if factor > 1:
        raise ConfigError(f"partial_rotary_factor must be in (0, 1], not {factor}")
    rotary_dim = int(head_dim * factor)
    section = rope.get("mrope_section")
    if section is not None:
        if not isinstance(section, list) or any(
            type(axis) is not int or axis < 0 for axis in section
        ):
            raise ConfigError(
                f"rope_parameters.mrope_section must be a list of counts, not {shown(section)}"
            )
        if sum(section) != rotary_dim // 2:
            raise ConfigError(
                f"rope_parameters.mrope_section {shown(section)} must sum to half of the "
                f"{rotary_dim} rotary dimensions"
            )
    return theta, rotary_dim


def read_tie_word_embeddings(fields: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Sizes differ in the level they have it at; the default is false."""
    values = [level.get("tie_word_embeddings") for level in (fields, text)]
    found = [value for value in values if value is not None]
    for value in found:
        if not isinstance(value, bool):
            raise ConfigError(f"tie_word_embeddings must be true or false, not {shown(value)}")
    if len(set(found)) > 1:
        raise ConfigError("tie_word_embeddings differs between the top level and text_config")
    return found[0] if found else False


def read_dtype(fields: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """What the checkpoint says its weights are, unchecked."""
    for level in (text, fields):
        for name in ("dtype", "torch_dtype"):
            if level.get(name) is not None:
                return level[name]
    return "bfloat16"


def read_token_ids(name: str, value: object) -> tuple[int, ...]:
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids: list[int] = []
    for token_id in given:
        if (
            isinstance(token_id, bool)
            or not isinstance(token_id, int)
            or not 0 <= token_id <= _LARGEST_INTEGER
        ):
            raise ConfigError(f"{name} must be a token id or a list of them, not {shown(value)}")
        ids.append(token_id)
    return tuple(ids)


def required(text: Mapping[str, Any], name: str) -> int:
    if name not in text:
        raise ConfigError(f"{name} is missing")
    return positive_integer(name, text[name])


def positive_integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_INTEGER:
        raise ConfigError(f"{name} must be a positive integer, not {shown(value)}")
    return value


def positive_number(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # JSON's integers may be longer than a float holds.
        with suppress(OverflowError):
            number = float(value)
            if math.isfinite(number) and number > 0:
                return number
    raise ConfigError(f"{name} must be a positive number, not {shown(value)}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: want a checkpoint directory") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _bare(word: object) -> str:
    """As `shown`, without the quotes of a string."""
    return shown(word).strip("'")
