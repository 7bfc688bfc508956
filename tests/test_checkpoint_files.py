"""Opening checkpoint files: damaged shards, broken indexes, and views without copies."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen35_jax.checkpoint_files import open_checkpoint_files
from qwen35_jax.errors import CheckpointError
from tests.support.checkpoints import (
    INDEX_NAME,
    LONG_PREFIX,
    SHARD_NAMES,
    SINGLE_NAME,
    write_config,
    write_published_layout,
)
from tests.support.tiny_models import TINY_CONFIGS

NAME = "ratio2_tied"


def open_error(directory: Path) -> str:
    """The message of the CheckpointError that opening raises: always one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint_files(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut in the data": lambda content: content[: len(content) * 2 // 3],
    "one byte short": lambda content: content[:-1],
    "cut in the header": lambda content: content[:100],
    "cut in the length": lambda content: content[:5],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(4096),
    "a web page": lambda content: b"<!DOCTYPE html><html><body>Not Found</body></html>" * 20,
    "a pointer file": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a pickle": lambda content: b"PK\x03\x04" + bytes(1000),
    "a huge header": lambda content: struct.pack("<Q", 1 << 62) + content[8:],
    "a header that is no object": lambda content: _header("[1, 2]"),
    "offsets out of the file": lambda content: _header(
        '{"norm.weight":{"dtype":"BF16","shape":[64],"data_offsets":[0,128]}}'
    ),
    "a shape unlike its offsets": lambda content: (
        _header('{"norm.weight":{"dtype":"BF16","shape":[65],"data_offsets":[0,128]}}') + bytes(128)
    ),
    "one name twice": lambda content: (
        _header(
            '{"norm.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},'
            '"norm.weight":{"dtype":"BF16","shape":[1],"data_offsets":[2,4]}}'
        )
        + bytes(4)
    ),
    "trailing bytes": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_one_line_that_names_it(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    write_published_layout(tmp_path, NAME)
    shard = tmp_path / SHARD_NAMES[1]
    shard.write_bytes(damage(shard.read_bytes()))
    assert SHARD_NAMES[1] in open_error(tmp_path)


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    for shard in SHARD_NAMES:
        (tmp_path / shard).unlink()
    message = open_error(tmp_path)
    assert all(shard in message for shard in SHARD_NAMES)
    assert "are missing" in message


def test_directory_in_place_of_a_shard_counts_as_missing(tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    (tmp_path / SHARD_NAMES[0]).unlink()
    (tmp_path / SHARD_NAMES[0]).mkdir()
    assert f"{SHARD_NAMES[0]}, which is missing" in open_error(tmp_path)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_no_safetensors_files_are_named_as_wanted(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    write_config(tmp_path, TINY_CONFIGS[NAME])
    make(tmp_path / "pytorch_model.bin")
    message = open_error(tmp_path)
    assert INDEX_NAME in message and SINGLE_NAME in message


def test_directory_in_place_of_the_single_file_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, TINY_CONFIGS[NAME])
    (tmp_path / SINGLE_NAME).mkdir()
    assert SINGLE_NAME in open_error(tmp_path)


BROKEN_INDEXES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b'{"weight_map": ',
    "no text": b"\xff\xfe\x00",
    "a number": b"3",
    "a list": b"[]",
    "no weight map": b'{"metadata": {}}',
    "an empty weight map": b'{"weight_map": {}}',
    "a list as weight map": b'{"weight_map": ["x"]}',
    "a number as shard": b'{"weight_map": {"x": 3}}',
    "null as shard": b'{"weight_map": {"x": null}}',
    "deep nesting": b'{"weight_map": ' + b"[" * 200_000,
}


@pytest.mark.parametrize("content", BROKEN_INDEXES.values(), ids=BROKEN_INDEXES)
def test_broken_index_is_one_line_that_names_it(content: bytes, tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    (tmp_path / INDEX_NAME).write_bytes(content)
    assert INDEX_NAME in open_error(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", ""]
)
def test_index_can_not_name_a_file_outside_its_directory(shard: str, tmp_path: Path) -> None:
    write_published_layout(tmp_path / "model", NAME)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    index = {"weight_map": {f"{LONG_PREFIX}norm.weight": shard}}
    (tmp_path / "model" / INDEX_NAME).write_text(json.dumps(index))
    message = open_error(tmp_path / "model")
    assert INDEX_NAME in message and repr(shard) in message


def test_stored_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    for file in open_checkpoint_files(tmp_path):
        whole = np.frombuffer(file.map, np.uint8)
        for tensor in file.tensors:
            array = tensor.array()
            assert np.shares_memory(array, whole)
            assert not array.flags.writeable
