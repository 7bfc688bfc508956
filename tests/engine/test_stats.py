"""Where time goes by the marks of a stopwatch, and what an engine says of itself."""

import pytest

from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.engine.stats import HostSeconds, Stopwatch
from qwen35_jax.sampling_params import SamplingParams


def test_time_between_marks_adds_up_by_name():
    watch = Stopwatch(0.0)
    for start in (0.0, 10.0):
        watch.start(start)
        watch.mark("schedule", start + 1)
        watch.mark("collect", start + 4)
    assert watch.seconds == {"schedule": 2.0, "collect": 6.0}


def test_host_seconds_subtract_part_by_part():
    later = HostSeconds(schedule=3.0, build=1.0, dispatch=2.0, collect=5.0, finish=1.0)
    assert later - HostSeconds(schedule=1.0, collect=5.0) == HostSeconds(
        schedule=2.0, build=1.0, dispatch=2.0, finish=1.0
    )


def test_an_engine_counts_what_runs_and_what_ended():
    engine = FakeEngine(vocabulary_size=9, max_num_seqs=1, max_model_len=100)
    for name in ("a", "b"):
        engine.submit(Request(name, (1, 2, 3), SamplingParams(max_tokens=2)))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.04)
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished) == (0, 0, {"length": 2})
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 4)
