"""What is counted, and where time is said to go."""

from dataclasses import fields

import pytest

from qwen35_jax.engine.stats import EngineStats, HostSeconds, Stopwatch
from tests.support.engines import request, run, small_reopened


def stats(**changes: int) -> EngineStats:
    counts = {field.name: 0 for field in fields(EngineStats) if field.type in (int, "int")}
    return EngineStats(**counts | changes)  # pyright: ignore[reportArgumentType]


def test_time_between_marks_is_added_up_by_name():
    watch = Stopwatch(10.0)
    watch.start(100.0)
    watch.mark("build", 101.5)
    watch.mark("collect", 105.5)
    # What lies between two steps is nobody's.
    watch.start(200.0)
    watch.mark("build", 200.5)
    assert watch.seconds == {"build": 2.0, "collect": 4.0}


def test_a_watch_that_was_not_started_counts_from_when_it_was_made():
    watch = Stopwatch(10.0)
    watch.mark("build", 12.0)
    assert watch.seconds == {"build": 2.0}


def test_the_difference_of_two_times_is_what_was_spent_between_them():
    before = HostSeconds(schedule=1, build=2, dispatch=3, collect=4, finish=5)
    after = HostSeconds(schedule=1.5, build=3, dispatch=3, collect=14, finish=7)
    assert after - before == HostSeconds(schedule=0.5, build=1, dispatch=0, collect=10, finish=2)


def test_usage_is_the_share_of_the_caches_tokens():
    assert stats(kv_tokens=200).kv_cache_usage == 0.0
    assert stats(kv_tokens=200, kv_tokens_used=50).kv_cache_usage == 0.25
    assert stats(kv_tokens=200, kv_tokens_used=200).kv_cache_usage == 1.0


def test_an_engine_counts_what_it_does():
    engine = small_reopened(num_pages=101, max_num_seqs=2)
    assert engine.stats() == stats(max_num_seqs=2, kv_tokens=1600)
    for name in ("a", "b", "c"):
        engine.submit(request(name, (1,) * 20, max_tokens=10))
    assert (engine.stats().running, engine.stats().waiting) == (0, 3)
    engine.step()
    now = engine.stats()
    assert (now.running, now.waiting, now.steps) == (2, 1, 1)
    # Two pages of 16 tokens for each of the two prompts of 20.
    assert now.kv_tokens_used == 64 and now.kv_cache_usage == 0.04
    engine.abort("b")
    run(engine)
    end = engine.stats()
    assert (end.running, end.waiting, end.kv_tokens_used) == (0, 0, 0)
    assert end.prompt_tokens == 60
    assert end.generation_tokens == 20
    assert end.finished == {"length": 2, "abort": 1}
    assert end.steps > now.steps
    spent = end.host_seconds - now.host_seconds
    assert all(getattr(spent, field.name) > 0 for field in fields(HostSeconds))
    # What was read before does not change under its reader.
    assert now.finished == {}


def test_tokens_computed_again_after_a_preemption_count_as_prompt_only():
    engine = small_reopened(num_pages=12)
    prompts = {"a": 50, "b": 50}
    run(engine, *(request(name, (1,) * n, max_tokens=60) for name, n in prompts.items()))
    end = engine.stats()
    assert end.preemptions == 1
    assert end.generation_tokens == 120
    assert end.prompt_tokens > 150


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_ends_are_counted_by_reason(reason: str):
    engine = small_reopened()
    stops = [4] if reason == "stop" else []
    run(engine, request("r", (1,), max_tokens=3, logit_bias={4: 100.0}, stop_token_ids=stops))
    assert engine.stats().finished == {reason: 1}
