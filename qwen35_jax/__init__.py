"""Qwen3.5 inference in JAX: the served weights as a pytree, offline batches, and an engine.

Public names are imported when first used: `qwen35 --help` and the HTTP process never load jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35_jax.checkpoint import load_checkpoint as load_checkpoint
    from qwen35_jax.checkpoint_writer import save_checkpoint as save_checkpoint
    from qwen35_jax.config import EngineConfig as EngineConfig
    from qwen35_jax.config import ModelConfig as ModelConfig
    from qwen35_jax.llm import LLM as LLM
    from qwen35_jax.outputs import CompletionOutput as CompletionOutput
    from qwen35_jax.outputs import RequestOutput as RequestOutput
    from qwen35_jax.sampling_params import SamplingParams as SamplingParams

_HOME = {
    "LLM": "qwen35_jax.llm",
    "SamplingParams": "qwen35_jax.sampling_params",
    "ModelConfig": "qwen35_jax.config",
    "EngineConfig": "qwen35_jax.config",
    "RequestOutput": "qwen35_jax.outputs",
    "CompletionOutput": "qwen35_jax.outputs",
    "load_checkpoint": "qwen35_jax.checkpoint",
    "save_checkpoint": "qwen35_jax.checkpoint_writer",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "load_checkpoint",
    "save_checkpoint",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
