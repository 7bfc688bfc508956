"""Save a parameter tree in the published layout: sharded safetensors, an index, a config.json."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from qwen35_jax.checkpoint import named_parameters
from qwen35_jax.checkpoint_files import INDEX_NAME
from qwen35_jax.checkpoint_names import TensorSlot, stored_name, tensor_slots
from qwen35_jax.errors import CheckpointError
from qwen35_jax.model.transformer import Qwen35

SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_checkpoint(
    params: Qwen35,
    directory: str | os.PathLike[str],
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, index and config.json so that this library and transformers load them.

    Each parameter is split into the checkpoint's tensors, in the parameter's dtype; the multi-token
    prediction layer's go with them where there is one. One shard at a time is held on the host.
    tokenizer_from: the checkpoint directory to copy tokenizer and chat template from, which LLM and
    the commands need. A directory that already holds a checkpoint is refused.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / INDEX_NAME).exists() or any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} already holds a checkpoint; choose another directory")
    leaves = dict(named_parameters(params))
    has_mtp = hasattr(params, "mtp")
    shards = _plan_shards(tensor_slots(params.config, mtp=has_mtp), leaves, shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model.safetensors-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            stored_name(slot.name): _stored_array(slot, leaves[slot.path], first)
            for slot, first in shard
        }
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
        total += sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / INDEX_NAME, index)
    # safetensors makes its files readable by their owner alone, whatever the umask.
    mode = (directory / INDEX_NAME).stat().st_mode
    for file_name in set(weight_map.values()):
        (directory / file_name).chmod(mode)
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (source := Path(tokenizer_from) / name).is_file():
                shutil.copyfile(source, directory / name)
    config = params.config.to_dict()
    config["text_config"]["mtp_num_hidden_layers"] = int(has_mtp)
    _write_json(directory / "config.json", config)


def _plan_shards(
    slots: list[TensorSlot], leaves: dict[str, jax.Array], shard_bytes: int
) -> list[list[tuple[TensorSlot, int]]]:
    """Slots in order, each with its first column in its parameter, split by size."""
    shards: list[list[tuple[TensorSlot, int]]] = [[]]
    size = 0
    columns: dict[str, int] = {}
    for slot in slots:
        slot_bytes = int(np.prod(slot.shape)) * leaves[slot.path].dtype.itemsize
        if size and size + slot_bytes > shard_bytes:
            shards.append([])
            size = 0
        first = columns.get(slot.path, 0)
        columns[slot.path] = first + slot.shape[0]
        shards[-1].append((slot, first))
        size += slot_bytes
    return shards


def _stored_array(slot: TensorSlot, leaf: jax.Array, first: int) -> np.ndarray:
    if slot.form == "transposed":
        leaf = leaf[:, first : first + slot.shape[0]].T
    elif slot.form == "squeezed":
        leaf = leaf[:, None]
    return np.ascontiguousarray(jax.device_get(leaf))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
