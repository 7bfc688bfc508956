"""From an EngineConfig to a loaded model and its engine: what every door does first."""

import logging
from dataclasses import dataclass
from pathlib import Path

import jax

from qwen35_jax.checkpoint import human_bytes, load_or_make_params
from qwen35_jax.compile_cache import CompileCounter, enable_compile_cache
from qwen35_jax.config import EngineConfig
from qwen35_jax.device_memory import memory_budget, reserve_device_memory
from qwen35_jax.engine.buckets import Buckets
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.memory_plan import MemoryPlan, plan_memory
from qwen35_jax.engine.plan import CHUNK
from qwen35_jax.engine.runner import Runner
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.errors import ConfigError
from qwen35_jax.model.transformer import Qwen35, parameter_bytes, parameter_count
from qwen35_jax.model_files import ModelFiles, find_model
from qwen35_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A CPU's step takes as long as its tokens, and its few programs fit large steps badly.
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 512, 2048


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, every program of it compiled, and what its door must know of the model.

    directory: the checkpoint's local files. description: the model's size and what it runs on.
    """

    engine: ContinuousBatchingEngine
    params: Qwen35
    tokenizer: Tokenizer
    directory: Path
    max_model_len: int
    model_name: str
    description: str
    memory_plan: MemoryPlan


def load_engine(config: EngineConfig) -> LoadedEngine:
    """Load the model that `config` names and make an engine for it, ready for its first request.

    Raises ConfigError, CheckpointError or TokenizerError, each in one line.
    """
    reserve_device_memory(config.gpu_memory_utilization)
    files = find_model(config)
    enable_compile_cache(config.compilation_cache_path())
    # Before the weights, which take long to read only to find that they don't fit.
    plan = plan_for(files, config)
    logger.info(plan.table())
    for warning in plan.warnings:
        logger.warning(warning)
    device = jax.devices()[0]
    try:
        params = load_or_make_params(
            files.directory, files.config, load_format=config.load_format, seed=config.seed
        )
        engine = _make_engine(params, files, config, plan)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"{files.name} does not fit on {device.device_kind} as planned: "
            f"{str(error).splitlines()[0]}; lower --gpu-memory-utilization or --max-num-seqs, or "
            "end other users of the device"
        ) from None
    description = (
        f"{parameter_count(params):,} parameters, {human_bytes(parameter_bytes(params))} in "
        f"{files.config.dtype} on {device.device_kind}, context {files.max_model_len}"
    )
    return LoadedEngine(
        engine=engine,
        params=params,
        tokenizer=files.tokenizer,
        directory=files.directory,
        max_model_len=files.max_model_len,
        model_name=files.name,
        description=description,
        memory_plan=plan,
    )


def plan_for(files: ModelFiles, config: EngineConfig) -> MemoryPlan:
    """What the device's memory will be used for. No weights need be there yet.

    Raises ConfigError where it is too little.
    """
    return plan_memory(
        files.config,
        weight_bytes=parameter_bytes(Qwen35(files.config)),
        budget_bytes=memory_budget(config.gpu_memory_utilization, weight_bytes=0),
        max_num_seqs=config.max_num_seqs,
        max_model_len=files.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens(config),
        page_size=config.block_size,
        kv_cache_tokens=config.kv_cache_tokens,
    )


def max_num_batched_tokens(config: EngineConfig) -> int:
    """Tokens of one step."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    usual = CPU_BATCHED_TOKENS if jax.default_backend() == "cpu" else GPU_BATCHED_TOKENS
    # A token of every sequence, and some of a prompt.
    return max(usual, config.max_num_seqs + CHUNK)


def _make_engine(
    params: Qwen35, files: ModelFiles, config: EngineConfig, plan: MemoryPlan
) -> ContinuousBatchingEngine:
    """With all its programs compiled."""
    budget = max_num_batched_tokens(config)
    buckets = Buckets.make(
        max_rows=plan.max_num_seqs,
        max_chunks=-(-budget // CHUNK),
        few=jax.default_backend() == "cpu",
    )
    runner = Runner(params, files.tokenizer.vocabulary_size, plan.sizes, buckets)
    counter = CompileCounter(strict=config.strict_compilation)
    counter.start()
    try:
        runner.compile(progress=logger.isEnabledFor(logging.INFO))
        runner.rehearse()
    except BaseException:
        counter.close()
        runner.close()
        raise
    logger.info(
        "Compiled %d programs, %d more came from the cache",
        counter.num_compiled,
        counter.num_cache_hits,
    )
    counter.mark_ready()
    scheduler = Scheduler(
        num_slots=plan.sizes.num_slots,
        num_pages=plan.sizes.num_pages,
        page_size=plan.sizes.page_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=files.max_model_len,
        max_chunks=buckets.max_chunks,
    )
    return ContinuousBatchingEngine(
        runner=runner,
        scheduler=scheduler,
        compile_counter=counter,
        vocabulary_size=files.tokenizer.vocabulary_size,
        max_model_len=files.max_model_len,
        stop_token_ids=frozenset(files.config.eos_token_ids) | set(files.tokenizer.eos_token_ids),
        seed=config.seed,
    )
