"""Writes tiny checkpoints to disk in the layouts that people have them in."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny_models import TINY_CONFIGS, is_stored_float32, text_config, tiny_weights

LONG_PREFIX = "model.language_model."
SHORT_PREFIX = "model."
SHARD_NAMES = (
    "model.safetensors-00001-of-00002.safetensors",
    "model.safetensors-00002-of-00002.safetensors",
)
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

Tensors = dict[str, np.ndarray]


def stored_tensors(name: str, *, prefix: str, all_bfloat16: bool = False) -> Tensors:
    """A tiny model's tensors by stored name, F32 where the published files have F32."""
    return {
        bare if bare == "lm_head.weight" else prefix + bare: (
            weight
            if is_stored_float32(bare) and not all_bfloat16
            else weight.astype(ml_dtypes.bfloat16)
        )
        for bare, weight in tiny_weights(TINY_CONFIGS[name]).items()
    }


def other_tensors() -> Tensors:
    """What the multimodal files hold beside the text model: 3 vision and 2 mtp tensors."""
    zeros = np.zeros((4, 4), ml_dtypes.bfloat16)
    return {
        "model.visual.patch_embed.proj.weight": zeros,
        "model.visual.blocks.0.attn.qkv.weight": zeros,
        "model.visual.merger.norm.weight": zeros,
        "mtp.fc.weight": zeros,
        "mtp.layers.0.self_attn.q_proj.weight": zeros,
    }


def write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_single(directory: Path, tensors: Tensors) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / SINGLE_NAME)


def write_shards(directory: Path, tensors: Tensors) -> None:
    """Every other tensor to each of two shards with the published odd names, and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard_name in enumerate(SHARD_NAMES):
        shard = dict(list(tensors.items())[number::2])
        save_file(shard, directory / shard_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, shard_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def write_published_layout(directory: Path, name: str) -> Path:
    """Nested config, long prefix, vision and mtp beside it, two shards."""
    write_config(directory, TINY_CONFIGS[name])
    write_shards(directory, stored_tensors(name, prefix=LONG_PREFIX) | other_tensors())
    return directory


def write_bare_layout(directory: Path, name: str) -> Path:
    """The text model alone under `model.`, flat config, one file."""
    write_config(directory, text_config(TINY_CONFIGS[name]))
    write_single(directory, stored_tensors(name, prefix=SHORT_PREFIX))
    return directory


def write_flat_bfloat16_layout(directory: Path, name: str) -> Path:
    """As transformers saves the text model of a multimodal load: flat config, but the long prefix,
    and A_log and the gated norm as BF16."""
    flat = text_config(TINY_CONFIGS[name]) | {"architectures": ["Qwen3_5ForCausalLM"]}
    write_config(directory, flat)
    write_single(directory, stored_tensors(name, prefix=LONG_PREFIX, all_bfloat16=True))
    return directory
