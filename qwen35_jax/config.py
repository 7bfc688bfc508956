"""What the model is (ModelConfig, from the checkpoint) and how to run it (EngineConfig).

Both are frozen and hashable, so that they can be static arguments of jitted functions, and both are
checked once, when they are made.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from qwen35_jax.config_fields import (
    SIZES,
    check_choice,
    positive_integer,
    positive_number,
    read_dtype,
    read_json_object,
    read_layer_types,
    read_rope,
    read_tie_word_embeddings,
    read_token_ids,
    refuse_unsupported,
    required,
    shown,
)
from qwen35_jax.errors import ConfigError

LayerType = Literal["linear_attention", "full_attention"]
Dtype = Literal["bfloat16", "float32"]
Numerics = Literal["checkpoint", "transformers"]
LoadFormat = Literal["auto", "dummy"]

MAX_UTILIZATION = 0.97
BLOCK_SIZES = (16, 32, 64, 128, 256)
# JAX refuses to read both; the second is its old spelling.
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


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
        for name in (*SIZES, "head_dim"):
            positive_integer(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            positive_number(name, getattr(self, name))
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_choice("numerics", self.numerics, get_args(Numerics))
        if not self.layer_types:
            raise ConfigError("layer_types is empty")
        for index, layer_type in enumerate(self.layer_types):
            check_choice(f"layer_types[{index}]", layer_type, get_args(LayerType))
        _check_multiple(self, "num_attention_heads", "num_key_value_heads")
        _check_multiple(self, "linear_num_value_heads", "linear_num_key_heads")
        if (
            not isinstance(self.rotary_dim, int)
            or self.rotary_dim % 2
            or not 2 <= self.rotary_dim <= self.head_dim
        ):
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
        fields = read_json_object(path)
        try:
            config = cls.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        generation_path = path.parent / "generation_config.json"
        if not generation_path.exists():
            return config
        generation = read_json_object(generation_path)
        ids = read_token_ids(f"{generation_path}: eos_token_id", generation.get("eos_token_id"))
        merged = tuple(dict.fromkeys((*config.eos_token_ids, *ids)))
        return config.replace(eos_token_ids=merged)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """From the parsed config.json: nested (`text_config` inside) or flat."""
        text = fields.get("text_config", fields)
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config must be an object, not {shown(text)}")
        refuse_unsupported(fields, text)
        layer_types = read_layer_types(text)
        head_dim = required(text, "head_dim")
        theta, rotary_dim = read_rope(text, head_dim)
        copied: dict[str, Any] = {name: required(text, name) for name in SIZES}
        return cls(
            layer_types=layer_types,
            head_dim=head_dim,
            rope_theta=theta,
            rotary_dim=rotary_dim,
            tie_word_embeddings=read_tie_word_embeddings(fields, text),
            rms_norm_eps=positive_number("rms_norm_eps", text.get("rms_norm_eps", 1e-6)),
            eos_token_ids=read_token_ids("eos_token_id", text.get("eos_token_id")),
            dtype=read_dtype(fields, text),
            **copied,
        )

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads, in the published nested layout."""
        text = {name: getattr(self, name) for name in SIZES} | {
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
                "partial_rotary_factor": self._partial_rotary_factor,
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
    def _partial_rotary_factor(self) -> float:
        factor = self.rotary_dim / self.head_dim
        # Readers multiply and round down: 44 * (30 / 44) would give them 29.
        exact = int(self.head_dim * factor) == self.rotary_dim
        return factor if exact else math.nextafter(factor, 1.0)

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
    max_num_batched_tokens: tokens of one step, decoded and of prompts together; None takes what
    suits the device.
    gpu_memory_utilization: the share of the device's memory for weights, caches and workspace.
    kv_cache_tokens: room in the KV cache; None takes what that share leaves.
    block_size: tokens of one page of it.
    compilation_cache_dir: keeps compiled programs for the next start; "auto" is in the user's cache
    directory; None, "" and "none" keep nothing.
    strict_compilation: a program compiled once the engine is ready is an error, not a slow step.
    """

    model: str | None = None
    load_format: LoadFormat = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    numerics: Numerics = "checkpoint"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_tokens: int | None = None
    block_size: int = 64
    compilation_cache_dir: str | None = "auto"
    strict_compilation: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("load_format", self.load_format, get_args(LoadFormat))
        check_choice("dtype", self.dtype, ("auto", *get_args(Dtype)))
        check_choice("numerics", self.numerics, get_args(Numerics))
        for name in ("max_model_len", "kv_cache_tokens", "max_num_batched_tokens"):
            if (value := getattr(self, name)) is not None:
                positive_integer(name, value)
        for name in ("max_num_seqs", "block_size"):
            positive_integer(name, getattr(self, name))
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be at least 2: a token of prompt, one of answer")
        budget = self.max_num_batched_tokens
        if budget is not None and budget <= self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be over max_num_seqs "
                f"({self.max_num_seqs}): a step decodes a token of every sequence and needs room "
                f"for a prompt; raise the one to {self.max_num_seqs + 1} or more, or lower the "
                "other"
            )
        _check_utilization(self.gpu_memory_utilization)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, "
                f"not {self.block_size}"
            )
        directory = self.compilation_cache_dir
        if directory is not None and not isinstance(directory, str):
            raise ConfigError(f"compilation_cache_dir must be a path, not {shown(directory)}")
        if not isinstance(self.strict_compilation, bool):
            raise ConfigError(
                f"strict_compilation must be true or false, not {shown(self.strict_compilation)}"
            )
        seed_is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not seed_is_integer or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer of 64 bits, not {shown(self.seed)}")

    def compilation_cache_path(self) -> Path | None:
        """Where compiled programs are kept; None for nowhere.

        "auto" goes where JAX_COMPILATION_CACHE_DIR says, else to the user's cache directory.
        """
        name = self.compilation_cache_dir
        if not name or name == "none":
            return None
        if name != "auto":
            return Path(os.path.expanduser(name))
        if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            return Path(chosen)
        # A relative path in the variable is to be ignored, says its specification.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():
            base = Path(os.path.expanduser("~/.cache"))
        # Of a user without a home nothing is expanded.
        return base / "qwen35-jax" / "compile" if base.is_absolute() else None


def device_memory_fraction() -> float | None:
    """The share of a GPU's memory that the environment tells JAX to take; None for its default.

    Raises ConfigError for what JAX can't read.
    """
    given = {name: os.environ[name] for name in _FRACTION_NAMES if os.environ.get(name)}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both set; remove the latter")
    for name, value in given.items():
        try:
            return positive_number(name, float(value))
        except ValueError:
            raise ConfigError(f"{name} must be a positive number, not {value!r}") from None
    return None


def set_device_memory_fraction(fraction: float) -> None:
    """For the JAX of this process and its children, where it has not met its devices yet."""
    os.environ[_FRACTION_NAMES[0]] = f"{fraction:g}"


def _check_utilization(value: object) -> None:
    fraction = positive_number("gpu_memory_utilization", value)
    if fraction > 1:
        raise ConfigError(
            f"gpu_memory_utilization is a share of the device's memory, as 0.9; not {fraction:g}"
        )
    if fraction > MAX_UTILIZATION:
        raise ConfigError(
            f"gpu_memory_utilization must be at most {MAX_UTILIZATION}, not {fraction:g}: the "
            "driver, its libraries and the recorded graphs need the rest; try 0.9"
        )


def _check_multiple(config: ModelConfig, larger: str, smaller: str) -> None:
    if getattr(config, larger) % getattr(config, smaller):
        raise ConfigError(
            f"{larger} ({getattr(config, larger)}) must be a multiple of "
            f"{smaller} ({getattr(config, smaller)})"
        )
