"""Saving: what is written loads again bit for bit, in files that others can read."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from qwen35_jax.checkpoint import load_checkpoint, random_params
from qwen35_jax.checkpoint_writer import save_checkpoint
from qwen35_jax.config import Dtype, ModelConfig
from qwen35_jax.errors import CheckpointError
from qwen35_jax.model.transformer import parameter_bytes
from tests.support.checkpoints import (
    INDEX_NAME,
    LONG_PREFIX,
    SHARD_NAMES,
    stored_tensors,
    write_published_layout,
)
from tests.support.models import assert_same_params, tiny_config, tiny_params
from tests.support.tiny_models import TINY_CONFIGS, is_stored_float32
from tests.support.tiny_tokenizer import write_tiny_tokenizer


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 40_000, 1])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_saved_parameters_load_bit_for_bit(name: str, shard_bytes: int, tmp_path: Path) -> None:
    params = tiny_params(name, dtype="bfloat16")
    save_checkpoint(params, tmp_path, shard_bytes=shard_bytes)
    assert_same_params(load_checkpoint(tmp_path, progress=False), params)
    shards = list(tmp_path.glob("*.safetensors"))
    if shard_bytes == 1:
        assert len(shards) == len(stored_tensors(name, prefix=LONG_PREFIX))
    else:
        assert (len(shards) == 1) == (shard_bytes > parameter_bytes(params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_parameters_load_bit_for_bit(dtype: Dtype, tmp_path: Path) -> None:
    # The decays of random weights need all of float32, unlike those of the tiny ones.
    params = random_params(tiny_config("ratio2_tied", dtype=dtype), seed=1)
    save_checkpoint(params, tmp_path)
    assert_same_params(load_checkpoint(tmp_path, progress=False), params)


def test_files_hold_the_published_tensors(tmp_path: Path) -> None:
    name = "ratio3_untied"
    save_checkpoint(tiny_params(name, dtype="bfloat16"), tmp_path, shard_bytes=100_000)
    weight_map = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
    expected = stored_tensors(name, prefix=LONG_PREFIX)
    assert weight_map.keys() == expected.keys()
    for file_name in set(weight_map.values()):
        with safe_open(tmp_path / file_name, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
            names = file.keys()
            assert names
            for tensor_name in names:
                assert weight_map[tensor_name] == file_name
                array = file.get_tensor(tensor_name)
                assert array.dtype == expected[tensor_name].dtype
                assert (array.dtype == np.float32) == is_stored_float32(tensor_name)
                np.testing.assert_array_equal(array, expected[tensor_name])


def test_index_counts_bytes_and_shards_stay_under_their_limit(tmp_path: Path) -> None:
    params = tiny_params("ratio2_tied", dtype="bfloat16")
    save_checkpoint(params, tmp_path, shard_bytes=60_000)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == parameter_bytes(params)
    names = sorted(set(index["weight_map"].values()))
    assert names == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names[0] == f"model.safetensors-00001-of-{len(names):05d}.safetensors"
    header_allowance = 10_000
    assert all((tmp_path / name).stat().st_size <= 60_000 + header_allowance for name in names)


def test_saved_config_is_the_models(tmp_path: Path) -> None:
    params = tiny_params("flat_interval3", dtype="bfloat16")
    save_checkpoint(params, tmp_path)
    assert ModelConfig.from_file(tmp_path) == params.config


def test_directory_with_a_checkpoint_is_refused_and_left_alone(tmp_path: Path) -> None:
    write_published_layout(tmp_path, "ratio2_tied")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        save_checkpoint(tiny_params("ratio2_tied"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("left", [INDEX_NAME, SHARD_NAMES[0], "model.safetensors"])
def test_any_left_checkpoint_file_is_enough_to_refuse(left: str, tmp_path: Path) -> None:
    (tmp_path / left).touch()
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        save_checkpoint(tiny_params("ratio2_tied"), tmp_path)


def test_missing_directories_are_made(tmp_path: Path) -> None:
    params = tiny_params("ratio2_tied", dtype="bfloat16")
    save_checkpoint(params, tmp_path / "a" / "b")
    assert_same_params(load_checkpoint(tmp_path / "a" / "b", progress=False), params)


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    write_tiny_tokenizer(source)
    save_checkpoint(tiny_params("ratio1_tied"), saved, tokenizer_from=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (saved / name).read_bytes() == (source / name).read_bytes()
