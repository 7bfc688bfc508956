"""safetensors files of one checkpoint directory, read by memory map.

The safetensors library checks each file's header; arrays are views of the map, so that a weight's
bytes go from the page cache to the device without another copy on the host.
"""

import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qwen35_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file. dtype is the file's word for it, such as "BF16"."""

    name: str
    file: "MappedFile"
    dtype: str
    shape: tuple[int, ...]
    start: int

    def array(self) -> np.ndarray:
        """A read-only view of the file, without a copy."""
        dtype = DTYPES[self.dtype]
        count = int(np.prod(self.shape, dtype=np.int64))
        flat = np.frombuffer(self.file.map, dtype, count=count, offset=self.start)
        return flat.reshape(self.shape)


class MappedFile:
    """A safetensors file whose header has been checked and whose bytes are mapped."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="np"):
                pass
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
        (header_bytes,) = struct.unpack("<Q", self.map[:8])
        header = json.loads(self.map[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        self.tensors = [
            StoredTensor(
                name=name,
                file=self,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + header_bytes + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]

    def will_need_all(self) -> None:
        """Let the operating system read ahead: the whole file is about to be used."""
        self.map.madvise(mmap.MADV_WILLNEED)


def open_checkpoint_files(directory: Path) -> list[MappedFile]:
    """Map every shard the index names, or the single file. Raises CheckpointError naming the file.

    Shards are found through the index alone: their published names match no usual pattern.
    """
    index_path = directory / INDEX_NAME
    if index_path.exists():
        shards = sorted(set(_weight_map(index_path).values()))
        # Not Path.is_file: it raises for a name that is too long.
        missing = [name for name in shards if not os.path.isfile(directory / name)]
        if missing:
            names = [name if name.isprintable() else repr(name) for name in missing[:5]]
            names += [f"{len(missing) - 5} more"] if len(missing) > 5 else []
            raise CheckpointError(
                f"{directory}: {INDEX_NAME} names {', '.join(name[:100] for name in names)}, which "
                f"{'is' if len(missing) == 1 else 'are'} missing; download the checkpoint again"
            )
        return [MappedFile(directory / name) for name in shards]
    if (directory / SINGLE_NAME).is_file():
        return [MappedFile(directory / SINGLE_NAME)]
    raise CheckpointError(
        f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}: want a safetensors checkpoint"
    )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map object")
    for name, shard in weight_map.items():
        is_name = isinstance(shard, str) and os.path.basename(shard) == shard
        if not is_name or shard in ("", ".", ".."):
            raise CheckpointError(f"{path}: the shard of {name} is no file name: {shard!r}")
    return weight_map
