"""What the device does at most: read bandwidth and bf16 matmuls, measured in the run that needs
them, since absolute figures move from machine to machine."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

READ_BYTES = {"gpu": 4 * 2**30, "cpu": 64 * 2**20}
# [M, K] x [K, N]: a chunk of prompt and a long prompt through the 4B model's widths.
MATMULS = {
    "gpu": ((1024, 2560, 9728), (8192, 2560, 9728)),
    "cpu": ((128, 256, 256),),
}
REPEATS = 5
CALLS = 10


def measure_ceilings() -> dict[str, Any]:
    """read_gb_per_s, read_bytes (of the array), and matmul_tflops by shape."""
    device = jax.devices()[0]
    platform = device.platform if device.platform in READ_BYTES else "cpu"
    size = READ_BYTES[platform]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        size = min(size, limit // 4)
    return {
        "read_gb_per_s": round(read_bandwidth(size) / 1e9, 1),
        "read_bytes": size,
        "matmul_tflops": {
            "x".join(map(str, shape)): round(matmul_rate(*shape) / 1e12, 3)
            for shape in MATMULS[platform]
        },
    }


def read_bandwidth(size: int) -> float:
    """Bytes a second, summing a bf16 array of `size` bytes; the better of two ways to sum."""
    columns = 2**14
    data = _numbers(max(1, size // 2 // columns), columns)
    to_one = jax.jit(lambda array: jnp.sum(array, dtype=jnp.float32))
    to_rows = jax.jit(lambda array: jnp.sum(array, axis=1, dtype=jnp.float32))
    seconds = min(seconds_a_call(to_one, data), seconds_a_call(to_rows, data))
    num_bytes = data.nbytes
    data.delete()
    return num_bytes / seconds


def matmul_rate(rows: int, inner: int, columns: int) -> float:
    """Floating-point operations a second of [rows, inner] x [inner, columns] in bf16."""
    left, right = _numbers(rows, inner), _numbers(inner, columns)
    seconds = seconds_a_call(jax.jit(jnp.matmul), left, right)
    left.delete()
    right.delete()
    return 2 * rows * inner * columns / seconds


def seconds_a_call(
    function: Callable[..., Any],
    *arguments: Any,
    calls: int = CALLS,
    repeats: int = REPEATS,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """The median over `repeats` of `calls` calls, dispatched one after the other and waited for
    once, over their number."""
    result = function(*arguments)
    jax.block_until_ready(result)
    times = []
    for _ in range(repeats):
        started = clock()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((clock() - started) / calls)
    return median(times)


@jax.jit(static_argnums=(0, 1))
def _numbers(rows: int, columns: int) -> jax.Array:
    """[rows, columns] bf16 in [-0.5, 0.5], different enough: zeros run faster than data. Made
    in one pass, for a random generator would need several times the array."""
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)
    mixed = (row * jnp.uint32(2654435761)) ^ (column * jnp.uint32(2246822519))
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    return ((mixed >> 16).astype(jnp.float32) / 2**16 - 0.5).astype(jnp.bfloat16)
