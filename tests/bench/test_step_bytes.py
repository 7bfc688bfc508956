"""Bytes of a decode step against figures worked out by hand for the 4B shape."""

from pathlib import Path

import pytest

from bench.step_bytes import read_share, step_bytes
from qwen35_jax.config import ModelConfig

CONFIG = Path(__file__).parents[2] / "bench" / "configs" / "qwen3.5-4b.json"


def test_a_step_of_the_4b_shape_moves_what_its_dimensions_say():
    found = step_bytes(ModelConfig.from_file(CONFIG))
    # 8.41 GB, with the tied embedding as the head.
    assert found.weights == pytest.approx(8.41e9, rel=2e-3)
    # 24 layers of 32 x 128 x 128 float32, and of 3 x 8,192 bf16.
    assert found.state == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert found.state / 2**20 == 49.125
    # 96 MiB of a sequence's recurrent state, read and written, and its windows.
    assert (found.read(1, 0) - found.weights + found.state) / 2**20 == 96 + 2 * 1.125
    # 8 layers of keys and values, 4 heads of 256 in bf16.
    assert found.kv == 8 * 2 * 4 * 256 * 2
    assert found.read(16, 1000) == found.weights + 16 * (found.state + 1000 * found.kv)
    assert found.written(16) == 16 * (found.state + found.kv)


def test_an_untied_embedding_is_not_read():
    tied = ModelConfig.from_file(CONFIG)
    untied = tied.replace(tie_word_embeddings=False)
    assert step_bytes(untied).weights == step_bytes(tied).weights


def test_the_share_is_of_the_ceiling():
    assert read_share(2e9, 0.001, 4000) == pytest.approx(0.5)
