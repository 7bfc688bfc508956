"""The embedded default model: a tiny checkpoint with random weights, in the real files' layout.

What it says is noise. It is there so that every command, test and notebook runs at once, without
the network, through the same files and the same code as the real model.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

from qwen35_jax.config import cache_directory
from qwen35_jax.errors import CheckpointError
from qwen35_jax.tokenizer_recipe import ADDED_TOKENS, tokenizer_config, train_tokenizer

DEFAULT_MODEL_NAME = "qwen3.5-tiny-random"
NUM_BYTE_AND_MERGED_TOKENS = 956
MAX_POSITION_EMBEDDINGS = 8192
WEIGHT_SEED = 0

_SHARDS = (
    "model.safetensors-00001-of-00002.safetensors",
    "model.safetensors-00002-of-00002.safetensors",
)
_INDEX = "model.safetensors.index.json"
_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    _INDEX,
    *_SHARDS,
)


def default_model_directory() -> Path:
    """The default model's directory, made on first use in the user's cache directory.

    Safe to call from several processes at once, and after one was killed half way: the directory
    appears whole or not at all. Its name carries a hash of everything its content comes from.

    Raises CheckpointError when it isn't there and can't be written.
    """
    cache = cache_directory()
    directory = cache / f"default-model-{_recipe_hash()}"
    if _is_whole(directory):
        return directory
    # A name of its own rather than mkdtemp, whose 0700 would shut others out of a shared cache.
    unfinished = cache / f".{directory.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        _write_checkpoint(unfinished)
        _put_in_place(unfinished, directory)
    except OSError as error:
        raise CheckpointError(
            f"the default model can't be written to {cache}: {error.strerror or error}; "
            "set QWEN35_CACHE_DIR to a directory that can be written"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _is_whole(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def _put_in_place(unfinished: Path, directory: Path) -> None:
    """Rename into place, whole; or file by file where a directory lost some of its files."""
    try:
        unfinished.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        if not _is_whole(directory):
            for name in _FILES:
                (unfinished / name).replace(directory / name)


def _recipe_hash() -> str:
    # This file is part of the recipe: a change of a constant or a formula gets a new directory.
    # The libraries are too: a new release may train other merges or draw other numbers.
    parts = (
        _package_file("default_model.py"),
        _package_file("tokenizer_recipe.py"),
        _package_file("assets/tokenizer_text.txt"),
        _package_file("assets/chat_template.jinja"),
        f"{np.__version__} {tokenizers.__version__}".encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _package_file(name: str) -> bytes:
    return (resources.files("qwen35_jax") / name).read_bytes()


def _write_checkpoint(directory: Path) -> None:
    text = _package_file("assets/tokenizer_text.txt").decode()
    tokenizer = train_tokenizer([text], NUM_BYTE_AND_MERGED_TOKENS)
    ids = {
        content: NUM_BYTE_AND_MERGED_TOKENS + place
        for place, (content, _) in enumerate(ADDED_TOKENS)
    }
    config = _config(ids)
    _write_json(directory / "config.json", config)
    _write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write_json(
        directory / "tokenizer_config.json",
        tokenizer_config(NUM_BYTE_AND_MERGED_TOKENS, model_max_length=MAX_POSITION_EMBEDDINGS),
    )
    (directory / "chat_template.jinja").write_bytes(_package_file("assets/chat_template.jinja"))
    _write_weights(directory, config["text_config"])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def _config(ids: dict[str, int]) -> dict[str, Any]:
    """config.json of the real model with small sizes, and without vision tower and MTP layer."""
    num_ids = NUM_BYTE_AND_MERGED_TOKENS + len(ADDED_TOKENS)
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": ids["<|endoftext|>"],
            "full_attention_interval": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 128,
            "initializer_range": 0.02,
            "intermediate_size": 256,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 32,
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 0,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "tie_word_embeddings": True,
            "use_cache": True,
            # Padded to a multiple of 64, with at least one row that no token uses: as in the real
            # model, sampling must mask those rows.
            "vocab_size": (num_ids // 64 + 1) * 64,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
        },
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": ids["<|video_pad|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def _write_weights(directory: Path, text_config: dict[str, Any]) -> None:
    shards: tuple[dict[str, np.ndarray], ...] = ({}, {})
    for name, array in _weights(text_config):
        first_half = ".layers.0." in name or ".layers.1." in name or "embed_tokens" in name
        shards[0 if first_half else 1][name] = array
    for shard_name, tensors in zip(_SHARDS, shards, strict=True):
        # Not save_file: it makes files that only their owner may read.
        content = safetensors.numpy.save(tensors, metadata={"format": "pt"})
        (directory / shard_name).write_bytes(content)
    sizes = {name: array.nbytes for shard in shards for name, array in shard.items()}
    weight_map = {
        name: shard_name
        for shard_name, tensors in zip(_SHARDS, shards, strict=True)
        for name in tensors
    }
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(directory / _INDEX, index)


def _weights(text_config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor: bfloat16, but A_log and the gated norm float32.

    Scaled so that each layer adds about as much as the embedding brings, and so that the logits
    spread over several units: greedy choices then don't hang on the last bit.
    """
    generator = np.random.default_rng(WEIGHT_SEED)
    hidden: int = text_config["hidden_size"]
    inner: int = text_config["intermediate_size"]
    head_dim: int = text_config["head_dim"]
    query_width = text_config["num_attention_heads"] * head_dim
    key_value_width = text_config["num_key_value_heads"] * head_dim
    value_heads: int = text_config["linear_num_value_heads"]
    key_width = text_config["linear_num_key_heads"] * text_config["linear_key_head_dim"]
    value_width = value_heads * text_config["linear_value_head_dim"]
    taps: int = text_config["linear_conv_kernel_dim"]

    def normal(*shape: int, spread: float | None = None) -> np.ndarray:
        scale = shape[-1] ** -0.5 if spread is None else spread
        return (generator.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

    def uniform(low: float, high: float, size: int) -> np.ndarray:
        return generator.uniform(low, high, size)

    root = "model.language_model"
    yield f"{root}.embed_tokens.weight", normal(text_config["vocab_size"], hidden, spread=0.25)
    for number, layer_type in enumerate(text_config["layer_types"]):
        layer = f"{root}.layers.{number}"
        yield f"{layer}.input_layernorm.weight", normal(hidden, spread=0.1)
        if layer_type == "linear_attention":
            part = f"{layer}.linear_attn"
            yield f"{part}.in_proj_qkv.weight", normal(2 * key_width + value_width, hidden)
            yield f"{part}.in_proj_z.weight", normal(value_width, hidden)
            yield f"{part}.in_proj_b.weight", normal(value_heads, hidden)
            yield f"{part}.in_proj_a.weight", normal(value_heads, hidden)
            yield f"{part}.conv1d.weight", normal(2 * key_width + value_width, 1, taps)
            # Together these two make decays a token from about 0.99 to 0.1: long and short memory.
            bias = uniform(-4.0, 0.0, value_heads).astype(ml_dtypes.bfloat16)
            decay = np.log(uniform(0.5, 4.0, value_heads)).astype(np.float32)
            yield f"{part}.dt_bias", bias
            yield f"{part}.A_log", decay
            gated_norm = uniform(0.8, 1.2, text_config["linear_value_head_dim"])
            yield f"{part}.norm.weight", gated_norm.astype(np.float32)
            yield f"{part}.out_proj.weight", normal(hidden, value_width)
        else:
            part = f"{layer}.self_attn"
            yield f"{part}.q_proj.weight", normal(2 * query_width, hidden)
            yield f"{part}.k_proj.weight", normal(key_value_width, hidden)
            yield f"{part}.v_proj.weight", normal(key_value_width, hidden)
            yield f"{part}.o_proj.weight", normal(hidden, query_width)
            yield f"{part}.q_norm.weight", normal(head_dim, spread=0.1)
            yield f"{part}.k_norm.weight", normal(head_dim, spread=0.1)
        yield f"{layer}.post_attention_layernorm.weight", normal(hidden, spread=0.1)
        yield f"{layer}.mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", normal(inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", normal(hidden, inner)
    yield f"{root}.norm.weight", normal(hidden, spread=0.1)
