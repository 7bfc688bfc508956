"""Continuous batching: whatever runs beside a request, it gets what it gets alone."""

import random
from typing import Any

import pytest

from qwen35_jax.engine.request import TokenOutput
from tests.support.engines import ids_of, run, small_reopened
from tests.support.mixed_requests import LENGTHS, pools_of, random_request, run_arriving

# Float32 sums in another order: batches have other shapes than a request alone.
LOGPROB_TOLERANCE = 1e-3
# Pages of 16 tokens that the longest request fills: 190 of prompt, 60 generated.
LARGEST = -(-(LENGTHS[-1] + 60) // 16)


def test_two_hundred_mixed_requests_get_together_what_each_gets_alone():
    draw = random.Random(0)
    requests = [random_request(f"r{number}", draw) for number in range(200)]
    # A pool too small for all that would like to run, so that sequences are preempted.
    engine = small_reopened(num_pages=LARGEST * 12 // 10 + 1)
    before = pools_of(engine)
    together = run_arriving(engine, requests, draw, aborts=0.02)
    assert pools_of(engine) == before
    assert engine.scheduler.num_preemptions >= 10

    quiet = small_reopened()
    aborted = 0
    for request in requests:
        mixed = together[request.request_id]
        alone = run(quiet, request)[request.request_id]
        assert [output.finish_reason for output in mixed[:-1]] == [None] * (len(mixed) - 1)
        if mixed[-1].finish_reason == "abort":
            aborted += 1
            mixed = mixed[:-1]
            alone = alone[: len(mixed)]
        assert_same(mixed, alone)
    assert 10 <= aborted <= 100
    assert engine.stats().finished["abort"] == aborted
    assert set(engine.stats().finished) == {"stop", "length", "abort"}


def assert_same(mixed: list[TokenOutput], alone: list[TokenOutput]) -> None:
    assert ids_of(mixed) == ids_of(alone)
    for one, other in zip(mixed, alone, strict=True):
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        for name in ("logprobs", "prompt_logprobs"):
            for entry, other_entry in zip(
                entries_of(one, name), entries_of(other, name), strict=True
            ):
                assert (entry is None) == (other_entry is None)
                if entry is not None:
                    assert entry.token == pytest.approx(other_entry.token, abs=LOGPROB_TOLERANCE)
                    values = [value for _, value in entry.top]
                    expected = [value for _, value in other_entry.top]
                    assert values == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def entries_of(output: TokenOutput, name: str) -> list[Any]:
    """Log-probabilities, [None] where there are none."""
    return list(getattr(output, name) or [None])
