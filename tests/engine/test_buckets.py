"""Every step has a program that holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.engine.buckets import Buckets


@given(max_rows=st.integers(1, 1024), max_chunks=st.integers(1, 300), few=st.booleans())
def test_every_step_up_to_the_largest_has_the_smallest_program_that_holds_it(
    max_rows: int, max_chunks: int, few: bool
):
    buckets = Buckets.make(max_rows=max_rows, max_chunks=max_chunks, few=few)
    assert (buckets.max_rows, buckets.max_chunks) == (max_rows, max_chunks)
    for sizes, size_for in (
        (buckets.rows, buckets.rows_for),
        (buckets.chunks, buckets.chunks_for),
    ):
        assert list(sizes) == sorted(set(sizes))
        for count in range(1, sizes[-1] + 1):
            size = size_for(count)
            assert size >= count
            assert not [one for one in sizes if count <= one < size]


def test_what_no_program_holds_is_an_error_with_both_numbers():
    buckets = Buckets.make(max_rows=7, max_chunks=5, few=False)
    with pytest.raises(ValueError, match="no program holds 8; the largest holds 7"):
        buckets.rows_for(8)
    with pytest.raises(ValueError, match="no program holds 6; the largest holds 5"):
        buckets.chunks_for(6)


def test_odd_limits_end_the_lists():
    assert Buckets.make(max_rows=33, max_chunks=5, few=False) == Buckets(
        rows=(1, 2, 4, 8, 16, 24, 32, 33), chunks=(1, 2, 4, 5)
    )
    assert Buckets.make(max_rows=33, max_chunks=5, few=True) == Buckets(
        rows=(1, 16, 33), chunks=(1, 5)
    )
    assert Buckets.make(max_rows=1, max_chunks=1, few=True) == Buckets(rows=(1,), chunks=(1,))
    # A size of the list that is the limit is there once.
    assert Buckets.make(max_rows=16, max_chunks=8, few=True) == Buckets((1, 16), (1, 8))


def test_a_gpus_decode_steps_waste_at_most_half_their_rows():
    buckets = Buckets.make(max_rows=256, max_chunks=32, few=False)
    assert all(buckets.rows_for(count) <= 2 * count for count in range(1, 257))
