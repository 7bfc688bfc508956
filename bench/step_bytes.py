"""What a decode step must move through the device's memory, from the model's shapes alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.paged import PagedKV, init_pools
from qwen35_jax.model.transformer import Qwen35, parameter_bytes


@dataclass(frozen=True)
class StepBytes:
    """weights: read once a step whatever its rows; a tied embedding is the head, an untied one is
    not read but for a few rows, which don't count. state: recurrent and convolution, of a sequence;
    read and written. kv: of a token of context; read, and written for the new one."""

    weights: int
    state: int
    kv: int

    def read(self, rows: int, context: float) -> float:
        """context: tokens that a row attends to, the mean."""
        return self.weights + rows * (self.state + self.kv * context)

    def written(self, rows: int) -> int:
        return rows * (self.state + self.kv)


def step_bytes(config: ModelConfig) -> StepBytes:
    params = Qwen35(config)
    weights = parameter_bytes(params)
    if not config.tie_word_embeddings:
        weights -= _bytes(params.embed)
    # Of one slot, and of one page that holds one token.
    pools = jax.eval_shape(lambda: init_pools(config, num_pages=1, page_size=1, num_slots=1))
    kv = [pool for pool in pools.layers if isinstance(pool, PagedKV)]
    state = [pool for pool in pools.layers if not isinstance(pool, PagedKV)]
    return StepBytes(weights, _bytes(state), _bytes(kv))


def read_share(bytes_read: float, seconds: float, gb_per_s: float) -> float:
    """The part of the read ceiling that a step reaches."""
    return bytes_read / seconds / (gb_per_s * 1e9)


def _bytes(tree: object) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
