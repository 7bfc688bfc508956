"""From an EngineConfig to a loaded model and its engine: what every door does first."""

import logging
from dataclasses import dataclass
from pathlib import Path

import jax

from qwen35_jax.checkpoint import human_bytes, load_or_make_params
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.default_model import DEFAULT_MODEL_NAME, default_model_directory
from qwen35_jax.engine.request import Engine, Request
from qwen35_jax.engine.static_batch import StaticBatchEngine
from qwen35_jax.errors import ConfigError
from qwen35_jax.hub import resolve_model
from qwen35_jax.model.transformer import Qwen35, parameter_bytes, parameter_count
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and what its door must know of the model.

    directory: the checkpoint's local files. description: one line about the model and device.
    """

    engine: Engine
    params: Qwen35
    tokenizer: Tokenizer
    directory: Path
    max_model_len: int
    model_name: str
    description: str

    def warm_up(self) -> None:
        """Compile what a short request needs, greedy and sampled, so that the first is quick.

        Raises ConfigError when even that fails.
        """
        logger.info("Compiling for the first requests ...")
        for number, temperature in enumerate((0.0, 1.0)):
            params = SamplingParams(temperature=temperature, max_tokens=2, ignore_eos=True)
            self.engine.submit(Request(f"warm-up-{number}", (0,), params))
            while self.engine.has_work():
                for output in self.engine.step():
                    if output.finish_reason == "error":
                        raise ConfigError(f"the model can't generate a token: {output.error}")


def load_engine(config: EngineConfig) -> LoadedEngine:
    """Load the model that `config` names and make an engine for it.

    Raises ConfigError, CheckpointError or TokenizerError, each in one line.
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
    try:
        params = load_or_make_params(
            directory, model_config, load_format=config.load_format, seed=config.seed
        )
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"{name} does not fit on {jax.devices()[0].device_kind}: its weights take "
            f"{human_bytes(parameter_bytes(Qwen35(model_config)))} ({str(error).splitlines()[0]})"
        ) from None
    engine = StaticBatchEngine(
        params=params,
        vocabulary_size=tokenizer.vocabulary_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        stop_token_ids=frozenset(model_config.eos_token_ids) | set(tokenizer.eos_token_ids),
        seed=config.seed,
    )
    device = jax.devices()[0]
    description = (
        f"{name}: {parameter_count(params):,} parameters, {human_bytes(parameter_bytes(params))} "
        f"in {model_config.dtype} on {device.device_kind}, context {max_model_len}"
    )
    return LoadedEngine(engine, params, tokenizer, directory, max_model_len, name, description)


def model_config_of(directory: Path, config: EngineConfig) -> ModelConfig:
    """The checkpoint's config with the user's dtype and numerics."""
    model_config = ModelConfig.from_file(directory).replace(numerics=config.numerics)
    return model_config if config.dtype == "auto" else model_config.replace(dtype=config.dtype)
