"""The random numbers of sampling: Gumbel noise for a token id, by row seed and step.

Adding it to log-probabilities and taking the argmax draws from their distribution. Each number is
its own function of (seed, step, id), so a few ids get theirs without those of the whole vocabulary.
In arrays of another shape its last bit may differ, as XLA's vectorised and scalar logarithms do.

The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011), the one of jax.random.fold_in, whose version for GPUs is a kernel of its own that
XLA can't fuse with what uses the numbers.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KEY_PARITY = 0x1BD11BDA


def gumbel_noise(seed: Array, step: Array, ids: Array) -> Array:
    """[R, N] float32. seed: [R, 2] uint32, high word first; step: [R] int32; ids: [R, N] int32."""
    row_key = threefry((seed[:, 0], seed[:, 1]), (jnp.zeros_like(step), step))
    key = (row_key[0][:, None], row_key[1][:, None])
    return gumbel_of_bits(*threefry(key, (jnp.zeros_like(ids), ids)))


def gumbel_of_bits(high: Array, low: Array) -> Array:
    """float32 from 64 random bits, two words of uint32.

    The largest is 45. From the usual 23 bits it would be 16, and beside a likely token none below a
    probability of 1e-7 would ever win.
    """
    uniform = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) + 0.5) * 2.0**-64
    # float32 rounds the largest to 1, whose noise would be minus infinity.
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two words of 32 random bits for each counter, high words first; shapes broadcast."""
    keys = [word.astype(jnp.uint32) for word in key]
    keys.append(keys[0] ^ keys[1] ^ jnp.uint32(KEY_PARITY))
    left = counter[0].astype(jnp.uint32) + keys[0]
    right = counter[1].astype(jnp.uint32) + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = (right << rotation) | (right >> (32 - rotation))
            right = right ^ left
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right
