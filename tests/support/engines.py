"""Engines on tiny models for tests that run many: compiled fast, and once a process."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from qwen35_jax.checkpoint_names import tensor_slots
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Engine, Request, TokenOutput
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.llm import LLM
from qwen35_jax.loading import LoadedEngine, load_engine
from qwen35_jax.model.transformer import Qwen35, forward
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.step import init_engine_state
from tests.support.checkpoints import LONG_PREFIX, write_config, write_shards
from tests.support.models import COMPILE_FAST, filled
from tests.support.tiny_models import TINY_CONFIGS, is_stored_float32, tiny_weights
from tests.support.tiny_tokenizer import END_OF_TEXT_ID, write_tiny_tokenizer

Outputs = dict[str, list[TokenOutput]]


@contextmanager
def fast_compilation() -> Iterator[None]:
    """Compiling takes longer than running here: leave most of XLA's optimisations out."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def two_layer_config() -> dict[str, Any]:
    """config.json of a model with one delta layer and one full-attention layer."""
    config = copy.deepcopy(TINY_CONFIGS["ratio2_tied"])
    config["text_config"] |= {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    return config


@cache
def two_layer_params() -> Qwen35:
    """In float32. Its logits' standard deviation is about 2.5."""
    fields = two_layer_config()
    config = ModelConfig.from_dict(fields).replace(dtype="float32")
    return filled(Qwen35(config), tensor_slots(config), tiny_weights(fields))


def write_two_layer_checkpoint(directory: Path) -> Path:
    """The same kind of model as files, with the tiny tokenizer."""
    config = two_layer_config()
    config["text_config"] |= {"vocab_size": 384, "eos_token_id": END_OF_TEXT_ID}
    write_config(directory, config)
    tensors = {
        LONG_PREFIX + name: weight if is_stored_float32(name) else weight.astype(ml_dtypes.bfloat16)
        for name, weight in tiny_weights(config).items()
    }
    write_shards(directory, tensors)
    write_tiny_tokenizer(directory)
    return directory


def small_engine_config(directory: Path, **changes: Any) -> EngineConfig:
    """In float32, and small: nine sequences of up to 2,304 tokens, five chunks of prompt a step.

    directory: what write_two_layer_checkpoint wrote.
    """
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 2304,
        "max_num_seqs": 9,
        "max_num_batched_tokens": 317,
        "block_size": 16,
        "kv_cache_tokens": 4608,
    }
    return EngineConfig(model=str(directory), **options | changes)


@cache
def small_loaded() -> LoadedEngine:
    """The engine of small_engine_config, for tests to reopen: nobody runs or closes this one."""
    with fast_compilation(), tempfile.TemporaryDirectory() as name:
        return load_engine(small_engine_config(write_two_layer_checkpoint(Path(name))))


def small_reopened(**limits: Any) -> ContinuousBatchingEngine:
    """A fresh engine with its programs; limits: `reopened`'s."""
    return reopened(small_loaded().engine, **limits)


@cache
def small_reference() -> Callable[[list[int]], np.ndarray]:
    """Ids -> its model's logits after each, [T, V] float32, by the plain forward pass."""
    compiled = jax.jit(forward, compiler_options=COMPILE_FAST)
    params = small_loaded().params

    def logits(ids: list[int]) -> np.ndarray:
        padding = [0] * (-len(ids) % 512)
        return np.asarray(compiled(params, jnp.asarray([ids + padding]))[0, : len(ids)])

    return logits


@cache
def default_llm() -> LLM:
    """An LLM on the embedded default model: the same for every caller, who leaves it open."""
    with fast_compilation():
        return LLM()


def default_reopened(config: EngineConfig) -> LoadedEngine:
    """In the place of load_engine: the default model with a fresh engine as `config` asks for.

    It runs the programs that default_llm compiled, which are for as many or more sequences and
    tokens.
    """
    loaded = default_llm().loaded
    max_model_len = config.max_model_len or loaded.max_model_len
    engine = reopened(loaded.engine, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len)
    return replace(
        loaded, engine=replace(engine, seed=config.seed), max_model_len=engine.max_model_len
    )


def reopened(
    engine: ContinuousBatchingEngine,
    *,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    num_pages: int | None = None,
    max_num_batched_tokens: int | None = None,
    seed: int = 0,
) -> ContinuousBatchingEngine:
    """A fresh engine with the programs of another, and limits at most as large."""
    runner = copy.copy(engine.runner)
    sizes = runner._sizes
    runner._state = init_engine_state(runner._config, sizes)
    scheduler = Scheduler(
        num_slots=sizes.num_slots,
        num_pages=num_pages or sizes.num_pages,
        page_size=sizes.page_size,
        max_num_seqs=max_num_seqs or engine.scheduler.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or engine.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len or engine.max_model_len,
        max_chunks=engine.scheduler.max_chunks,
    )
    return ContinuousBatchingEngine(
        runner=runner,
        scheduler=scheduler,
        vocabulary_size=engine.vocabulary_size,
        max_model_len=max_model_len or engine.max_model_len,
        stop_token_ids=engine.stop_token_ids,
        seed=seed,
    )


def request(request_id: str, prompt: tuple[int, ...], **params: Any) -> Request:
    """Greedy, and past the checkpoint's stop ids, unless `params` say otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True} | params
    return Request(request_id, prompt, SamplingParams(**options))


def run(engine: Engine, *requests: Request) -> Outputs:
    """Submit them all, then step until nothing is left; the outputs by request."""
    for one in requests:
        engine.submit(one)
    outputs: Outputs = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def ids_of(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
