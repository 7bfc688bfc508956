"""From what the user calls a model to its files, understood but for the weights. No jax here."""

import logging
from dataclasses import dataclass
from pathlib import Path

from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.default_model import DEFAULT_MODEL_NAME, default_model_directory
from qwen35_jax.errors import ConfigError
from qwen35_jax.hub import resolve_model
from qwen35_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found and understood; none of its weights is read.

    directory: the checkpoint's local files.
    """

    name: str
    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int


def find_model(config: EngineConfig) -> ModelFiles:
    """The model that `config` names: fetched if it is on the hub, its config and tokenizer read.

    Raises ConfigError, CheckpointError or TokenizerError.
    """
    if config.model is None:
        directory, name = default_model_directory(), DEFAULT_MODEL_NAME
        logger.info(
            "No model is named: the embedded default is tiny and knows what it was trained for and "
            "little else. Name another: a checkpoint directory or a hub id."
        )
    else:
        directory, name = resolve_model(config.model), str(config.model)
    model_config = model_config_of(directory, config)
    tokenizer = Tokenizer.from_directory(directory)
    if tokenizer.vocabulary_size > model_config.vocab_size:
        raise ConfigError(
            f"{directory}: the tokenizer has {tokenizer.vocabulary_size} ids, "
            f"config.json's vocab_size is {model_config.vocab_size}"
        )
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    if max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is over the checkpoint's max_position_embeddings "
            f"{model_config.max_position_embeddings}"
        )
    return ModelFiles(name, directory, model_config, tokenizer, max_model_len)


def model_config_of(directory: Path, config: EngineConfig) -> ModelConfig:
    """The checkpoint's config with the user's dtype and numerics."""
    model_config = ModelConfig.from_file(directory).replace(numerics=config.numerics)
    return model_config if config.dtype == "auto" else model_config.replace(dtype=config.dtype)
