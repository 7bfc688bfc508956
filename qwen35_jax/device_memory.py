"""How much of the device's memory there is to plan with."""

import jax
from jax._src.xla_bridge import backends_are_initialized

from qwen35_jax.config import device_memory_fraction, set_device_memory_fraction

# What JAX takes of a GPU unless told otherwise.
DEFAULT_FRACTION = 0.75


def reserve_device_memory(fraction: float) -> bool:
    """Have JAX take this share of the GPU's memory when it first meets it.

    False where that is settled already: JAX has met its devices, or the environment says a share.
    Raises ConfigError for an environment that JAX can't read.
    """
    # A share in the environment that JAX never saw would mislead memory_budget.
    if device_memory_fraction() is not None or backends_are_initialized():
        return False
    set_device_memory_fraction(fraction)
    return True


def memory_budget(gpu_memory_utilization: float, *, weight_bytes: int) -> int | None:
    """Bytes of the default device for weights, caches and workspace together.

    The share of the device that is asked for, or what JAX has taken of it where that is less, minus
    what else is on it from this process. weight_bytes: of the weights that are there already. None
    where the device states no limit, as CPUs do.
    """
    statistics = jax.devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    if not limit:
        return None
    taken = device_memory_fraction() or DEFAULT_FRACTION
    share = min(1.0, gpu_memory_utilization / taken)
    others = max(0, statistics.get("bytes_in_use", 0) - weight_bytes)
    return int(limit * share) - others
