"""The command-line options that every command which loads a model shares."""

import argparse
import logging
from dataclasses import fields
from typing import get_args

from qwen35_jax.config import BLOCK_SIZES, Dtype, EngineConfig, LoadFormat, Numerics

logger = logging.getLogger(__name__)


def add_engine_arguments(parser: argparse.ArgumentParser, *, model_required: bool = False) -> None:
    """MODEL (also as --model) and the options of EngineConfig."""
    model_help = "checkpoint directory or Hugging Face repository"
    if model_required:
        parser.add_argument("model", metavar="MODEL", help=model_help)
    else:
        model_help += " (default: the embedded model)"
        parser.add_argument("model", nargs="?", metavar="MODEL", help=model_help)
        parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="same as MODEL")
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="tokens of prompt and answer together (default: the checkpoint's)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="COUNT",
        default=EngineConfig.max_num_seqs,
        help="requests that run at once; others wait (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *get_args(Dtype)),
        default=EngineConfig.dtype,
        help="type of weights and activations; auto is the checkpoint's (default: %(default)s)",
    )
    parser.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        default=EngineConfig.load_format,
        help="dummy makes random weights and reads only the config (default: %(default)s)",
    )
    parser.add_argument(
        "--numerics",
        choices=get_args(Numerics),
        default=EngineConfig.numerics,
        help="transformers rounds where that library does (default: %(default)s)",
    )


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of EngineConfig about device memory, steps and compiled programs."""
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of one step: one of each running request, the rest of prompts (default: 2048 "
        "on a GPU, 512 on a CPU, more where --max-num-seqs needs it)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        default=EngineConfig.gpu_memory_utilization,
        help="share of the GPU's memory for weights, caches and workspace (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-tokens",
        type=int,
        metavar="TOKENS",
        help="room in the KV cache (default: what the GPU's share leaves; on a CPU 32768, or the "
        "context where that is longer)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        choices=BLOCK_SIZES,
        default=EngineConfig.block_size,
        help="tokens of one page of the KV cache, one of %(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--compilation-cache-dir",
        metavar="DIR",
        default=EngineConfig.compilation_cache_dir,
        help="where compiled programs are kept for the next start; auto is in the user's cache "
        "directory, none keeps nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--strict-compilation",
        action="store_true",
        help="a program that was not compiled before the start is an error, not a slow step",
    )


def add_dry_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print how memory would be used, and stop; no weights are read",
    )


def add_seed_argument(parser: argparse.ArgumentParser, *, help: str) -> None:
    parser.add_argument("--seed", type=int, default=EngineConfig.seed, help=help)


def engine_config(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, *, seed: int
) -> EngineConfig:
    """What the options ask for. Exits through `parser` when the model is given twice."""
    model_flag = getattr(arguments, "model_flag", None)
    if arguments.model is not None and model_flag is not None:
        parser.error("give the model once, as MODEL or as --model")
    given = vars(arguments)
    options = {
        field.name: given[field.name] for field in fields(EngineConfig) if field.name in given
    }
    # Not `or`: an empty name, of an unset shell variable, is refused and not the default model.
    model = model_flag if arguments.model is None else arguments.model
    return EngineConfig(**options | {"model": model, "seed": seed})


def print_memory_plan(config: EngineConfig) -> None:
    """What --dry-run does: the plan on stdout, and in the log where it falls short of the options.

    Brings in jax. Raises ConfigError, CheckpointError or TokenizerError.
    """
    from qwen35_jax.device_memory import reserve_device_memory
    from qwen35_jax.loading import plan_for
    from qwen35_jax.model_files import find_model

    files = find_model(config)
    reserve_device_memory(config.gpu_memory_utilization)
    plan = plan_for(files, config)
    print(plan.table())
    for warning in plan.warnings:
        logger.warning(warning)


def log_to_terminal() -> None:
    """This project's progress messages and everyone's warnings, on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    package = logging.getLogger("qwen35_jax")
    package.handlers, package.propagate = [handler], False
    package.setLevel(logging.INFO)
