"""The sizes that programs come in hold every step, and no more sizes than that takes."""

import pytest

from qwen35_jax.engine.buckets import Buckets


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("most", [1, 3, 7, 16, 33, 64, 300])
def test_every_step_finds_the_smallest_size_that_holds_it(most: int, few: bool):
    buckets = Buckets.make(max_rows=most, max_chunks=most, few=few)
    assert (buckets.max_rows, buckets.max_chunks) == (most, most)
    for sizes, choose in ((buckets.rows, buckets.rows_for), (buckets.chunks, buckets.chunks_for)):
        assert list(sizes) == sorted(set(sizes))
        for count in range(1, most + 1):
            assert choose(count) == min(size for size in sizes if size >= count)


def test_rows_of_decode_programs_grow_in_small_steps():
    assert Buckets.make(max_rows=64, max_chunks=1, few=False).rows == (
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
    )


def test_a_step_that_no_program_holds_is_an_error():
    with pytest.raises(ValueError, match="no program holds 8; the largest holds 7"):
        Buckets.make(max_rows=7, max_chunks=1, few=True).rows_for(8)
