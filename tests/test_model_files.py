"""A model's name becomes its files, and what can be told without weights is told at once."""

import logging
from pathlib import Path

import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.default_model import default_model_directory
from qwen35_jax.errors import ConfigError
from qwen35_jax.model_files import find_model
from tests.support.checkpoints import write_config
from tests.support.engines import two_layer_config
from tests.support.tiny_tokenizer import write_tiny_tokenizer


def write_model(directory: Path, *, vocab_size: int = 384) -> Path:
    """All but the weights."""
    config = two_layer_config()
    config["text_config"] |= {"vocab_size": vocab_size}
    write_config(directory, config)
    write_tiny_tokenizer(directory)
    return directory


def test_no_name_is_the_embedded_model_and_the_log_says_so(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "qwen35_jax")
    files = find_model(EngineConfig())
    assert (files.name, files.directory) == ("qwen3.5-tiny", default_model_directory())
    assert files.max_model_len == files.config.max_position_embeddings
    assert "the embedded default is tiny" in caplog.text


def test_a_directory_needs_no_weights_and_takes_the_users_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "qwen35_jax")
    files = find_model(
        EngineConfig(
            model=str(write_model(tmp_path)),
            dtype="float32",
            numerics="transformers",
            max_model_len=64,
        )
    )
    assert (files.name, files.directory) == (str(tmp_path), tmp_path)
    assert (files.config.dtype, files.config.numerics) == ("float32", "transformers")
    assert files.max_model_len == 64
    assert caplog.text == ""


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path):
    model = str(write_model(tmp_path, vocab_size=64))
    with pytest.raises(ConfigError, match="the tokenizer has 320 ids"):
        find_model(EngineConfig(model=model))


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError, match="max_model_len 999999 is over"):
        find_model(EngineConfig(max_model_len=999_999))
