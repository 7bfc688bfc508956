"""What the model is (ModelConfig, from the checkpoint) and how to run it (EngineConfig).

Both are frozen and hashable, so that they can be static arguments of jitted functions, and both are
checked once, when they are made. Environment variables are read here and nowhere else.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from qwen35_jax.errors import ConfigError

LayerType = Literal["linear_attention", "full_attention"]
Dtype = Literal["bfloat16", "float32"]
Numerics = Literal["checkpoint", "transformers"]
LoadFormat = Literal["auto", "dummy"]

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a dense Qwen3.5 text model, in the checkpoint's own field names.

    layer_types: one entry a layer. rotary_dim: how many of head_dim's dimensions RoPE turns.
    eos_token_ids: the ids that config.json and generation_config.json end on.
    dtype: of weights, activations and the KV cache. The recurrent state is always float32.
    numerics: where values are rounded. "checkpoint" keeps what the checkpoint keeps in float32
        (A_log, the gated norm) and rounds once at the end of each fused operation; "transformers"
        rounds wherever transformers 5.17 does with its eager attention, for parity tests.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    dtype: Dtype = "bfloat16"
    numerics: Numerics = "checkpoint"

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("numerics", self.numerics, get_args(Numerics))
        if not self.layer_types:
            raise ConfigError("layer_types is empty")
        for index, layer_type in enumerate(self.layer_types):
            _check_choice(f"layer_types[{index}]", layer_type, get_args(LayerType))
        _check_multiple(self, "num_attention_heads", "num_key_value_heads")
        _check_multiple(self, "linear_num_value_heads", "linear_num_key_heads")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor gives {self.rotary_dim} rotary dimensions of head_dim "
                f"{self.head_dim}: want an even number from 2 to head_dim"
            )
        if self.linear_conv_kernel_dim < 2:
            raise ConfigError(
                f"linear_conv_kernel_dim must be at least 2, not {self.linear_conv_kernel_dim}"
            )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "ModelConfig":
        """Read config.json (a file, or the directory that holds it), nested or flat.

        generation_config.json beside it adds its end tokens. Raises ConfigError naming the file
        and the field for what this engine doesn't implement.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        fields = _read_json_object(path)
        try:
            config = cls.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        generation_path = path.parent / "generation_config.json"
        if not generation_path.exists():
            return config
        ids = _token_ids("eos_token_id", _read_json_object(generation_path).get("eos_token_id"))
        merged = tuple(dict.fromkeys((*config.eos_token_ids, *ids)))
        return config.replace(eos_token_ids=merged)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """From the parsed config.json: nested (`text_config` inside) or flat."""
        text = fields.get("text_config", fields)
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config must be an object, not {text!r}")
        _refuse_unsupported(fields, text)
        layer_types = _layer_types(text)
        head_dim = _required(text, "head_dim")
        theta, rotary_dim = _rope(text, head_dim)
        copied: dict[str, Any] = {name: _required(text, name) for name in _COPIED}
        return cls(
            layer_types=layer_types,
            head_dim=head_dim,
            rope_theta=theta,
            rotary_dim=rotary_dim,
            tie_word_embeddings=_tie_word_embeddings(fields, text),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            eos_token_ids=_token_ids("eos_token_id", text.get("eos_token_id")),
            dtype=_checkpoint_dtype(fields, text),
            **copied,
        )

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads, in the published nested layout."""
        text = {name: getattr(self, name) for name in _COPIED} | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": list(self.eos_token_ids) or None,
            "dtype": self.dtype,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
            },
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": self.tie_word_embeddings,
        }

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def strict(self) -> bool:
        """Whether values are rounded wherever transformers rounds them."""
        return self.numerics == "transformers"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to run a model. Names are vLLM's.

    model: a local directory, a hub id, or None for the embedded default.
    load_format: "auto" reads the weights; "dummy" makes random ones on the device.
    dtype: "auto" takes the checkpoint's. max_model_len: longest prompt plus output, in tokens;
    None takes the checkpoint's. max_num_seqs: sequences in one batch at most.
    """

    model: str | None = None
    load_format: LoadFormat = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    numerics: Numerics = "checkpoint"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        _check_choice("dtype", self.dtype, ("auto", *get_args(Dtype)))
        _check_choice("numerics", self.numerics, get_args(Numerics))
        for name in ("max_model_len", "max_num_seqs"):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")


def cache_directory() -> Path:
    """Where this program keeps what it can make again: QWEN35_CACHE_DIR, else the user's cache."""
    chosen = os.environ.get("QWEN35_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "qwen35-jax"


# Copied from text_config as they are, under the same name.
_COPIED = (
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
_POSITIVE_INTEGERS = (*_COPIED, "head_dim", "rotary_dim")

# text_config fields whose other values mean a model that this engine doesn't implement.
_ONLY_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "attn_output_gate": (True, None),
    "hidden_act": ("silu", None),
    "mlp_only_layers": ([], None),
    "num_experts": (0, None),
    "num_experts_per_tok": (0, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
    "mamba_ssm_dtype": ("float32", None),
}


def _refuse_unsupported(fields: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for level in (fields, text):
        if level.get("quantization_config") is not None:
            method = "unknown"
            if isinstance(level["quantization_config"], Mapping):
                method = level["quantization_config"].get("quant_method", "unknown")
            raise ConfigError(
                f"quantization_config: quant_method {method} is not supported; "
                "use the bfloat16 checkpoint"
            )
    for level in (fields, text):
        model_type = level.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type {model_type!r} is not supported; want one of {', '.join(MODEL_TYPES)}"
            )
    for name, values in _ONLY_VALUE.items():
        if name in text and text[name] not in values:
            raise ConfigError(f"{name} = {text[name]!r} is not supported (only {values[0]!r} is)")


def _layer_types(text: Mapping[str, Any]) -> tuple[Any, ...]:
    count = _required(text, "num_hidden_layers")
    given = text.get("layer_types")
    if given is None:
        interval = text.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"full_attention_interval must be at least 1, not {interval!r}")
        return tuple(
            "full_attention" if (index + 1) % interval == 0 else "linear_attention"
            for index in range(count)
        )
    if not isinstance(given, list) or len(given) != count:
        raise ConfigError(
            f"layer_types must list one type a layer: num_hidden_layers is {count}, "
            f"layer_types has {len(given) if isinstance(given, list) else given!r}"
        )
    return tuple(given)


def _rope(text: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    """RoPE's base and how many dimensions it turns. M-RoPE is plain RoPE for text."""
    rope = text.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": text.get("rope_theta"), "rope_type": "default"}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters must be an object, not {rope!r}")
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        raise ConfigError(
            f"rope_parameters.rope_type = {rope_type!r}: RoPE scaling is not supported"
        )
    known = ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_interleaved")
    for name in rope:
        if name not in (*known, "mrope_section", "type"):
            raise ConfigError(f"rope_parameters.{name} is not supported")
    theta = rope.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"rope_parameters.rope_theta must be a positive number, not {theta!r}")
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ConfigError(f"partial_rotary_factor must be in (0, 1], not {factor!r}")
    rotary_dim = int(head_dim * factor)
    section = rope.get("mrope_section")
    if section is not None and sum(section) != rotary_dim // 2:
        raise ConfigError(
            f"rope_parameters.mrope_section {section} must sum to half of the "
            f"{rotary_dim} rotary dimensions"
        )
    return float(theta), rotary_dim


def _tie_word_embeddings(fields: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    found = {
        level["tie_word_embeddings"]
        for level in (fields, text)
        if level.get("tie_word_embeddings") is not None
    }
    if len(found) > 1:
        raise ConfigError("tie_word_embeddings differs between the top level and text_config")
    return bool(found.pop()) if found else False


def _checkpoint_dtype(fields: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    for level in (text, fields):
        for name in ("dtype", "torch_dtype"):
            value = level.get(name)
            if value is not None:
                _check_choice(name, value, get_args(Dtype))
                return value
    return "bfloat16"


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids: list[int] = []
    for token_id in given:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}")
        ids.append(token_id)
    return tuple(ids)


def _required(text: Mapping[str, Any], name: str) -> int:
    if name not in text:
        raise ConfigError(f"{name} is missing")
    value = text[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}")
    return value


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_multiple(config: ModelConfig, larger: str, smaller: str) -> None:
    if getattr(config, larger) % getattr(config, smaller):
        raise ConfigError(
            f"{larger} ({getattr(config, larger)}) must be a multiple of "
            f"{smaller} ({getattr(config, smaller)})"
        )


def _read_json_object(path: Path) -> dict[str, Any]:
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
