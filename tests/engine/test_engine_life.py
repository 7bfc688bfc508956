"""An engine over its life: pools and memory are as before, whatever came of its requests."""

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.plan import CHUNK
from qwen35_jax.engine.request import Request
from qwen35_jax.loading import load_engine
from tests.support.engines import (
    fast_compilation,
    ids_of,
    request,
    run,
    small_engine_config,
    small_reopened,
    write_two_layer_checkpoint,
)
from tests.support.mixed_requests import (
    fill_pools,
    pools_of,
    random_params,
    random_prompt,
)


def short_requests(count: int) -> Iterator[Request]:
    draw = random.Random(4)
    for number in range(count):
        prompt = random_prompt(draw, draw.randint(1, 40))
        yield Request(f"r{number}", prompt, random_params(draw, longest=40))


def some_slot(engine: ContinuousBatchingEngine, draw: random.Random) -> int:
    slots = [live.sequence.slot for live in engine._live.values()]
    return draw.choice([slot for slot in slots if slot is not None])


def test_hundreds_of_requests_that_end_in_every_way_leave_the_pools_as_at_the_start():
    # Pages for two or three at once, so that most are preempted or wait.
    engine = small_reopened(num_pages=14)
    before = pools_of(engine)
    draw = random.Random(0)
    requests = short_requests(400)
    ended: dict[str, str] = {}
    submitted = steps = 0
    while submitted < 400 or engine.has_work():
        while submitted < 400 and engine.scheduler.num_waiting < 4:
            engine.submit(next(requests))
            submitted += 1
        if engine._live and draw.random() < 0.1:
            engine.abort(draw.choice(list(engine._live)))
        if engine.scheduler.num_running and draw.random() < 0.05:
            fill_pools(engine, np.nan, slots=[some_slot(engine, draw)], pages=[])
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.request_id not in ended, "ended twice"
                ended[output.request_id] = output.finish_reason
        engine.scheduler.check_invariants()
        steps += 1
        assert steps < 20_000, "no end"
    assert len(ended) == 400
    counts = {reason: list(ended.values()).count(reason) for reason in set(ended.values())}
    assert set(counts) == {"stop", "length", "abort", "error"} and min(counts.values()) >= 20
    stats = engine.stats()
    assert stats.finished == counts and stats.preemptions >= 2
    assert stats.non_finite == counts["error"]
    assert pools_of(engine) == before
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_small_ones_pass_one_that_waits_for_pages_and_it_starts_in_bounded_time():
    # 18 pages: the big one needs 16 at once, the first holds four.
    engine = small_reopened(num_pages=19, max_num_seqs=4)
    engine.submit(request("first", (1,) * 30, max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.submit(request("big", (2,) * 240, max_tokens=10))
    for number in range(10):
        engine.submit(request(f"small{number}", (3,) * 5, max_tokens=8))
    ends: list[str] = []
    steps = 0
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                ends.append(output.request_id)
        steps += 1
    assert len(ends) == 12
    # Some go before it, and it does not wait for the end of time.
    assert ends.index("small0") < ends.index("big")
    assert steps < 30 + -(-240 // CHUNK) + 10 + 10 * 8


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_five_engines_one_after_the_other_give_all_device_memory_back(tmp_path: Path):
    directory = write_two_layer_checkpoint(tmp_path)
    asked = request("r", (1, 2, 3) * 30, temperature=1.0, seed=1, max_tokens=10, logprobs=3)
    answers = []
    baseline = live_bytes()
    for _ in range(5):
        with fast_compilation():
            loaded = load_engine(small_engine_config(directory))
        answers.append(ids_of(run(loaded.engine, asked)["r"]))
        loaded.engine.submit(request("left", (1,), max_tokens=None))
        loaded.engine.step()
        held = live_bytes()
        engine = loaded.engine
        engine.close()
        # One that is closed holds nothing, though somebody may hold it.
        del loaded
        assert live_bytes() == baseline < held
        assert engine.stats().finished == {"length": 1, "abort": 1}
    assert answers == [answers[0]] * 5 and len(answers[0]) == 10


def test_closing_ends_what_is_left_as_aborted():
    engine = small_reopened()
    for name in ("runs", "waits"):
        engine.submit(request(name, (1, 2), max_tokens=None))
    engine.step()
    engine.abort("waits")
    engine.close()
    assert not engine._live
    assert engine.stats().finished == {"abort": 2}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(engine.runner._state))
    # The programs and weights that it shares with others are theirs.
    assert len(ids_of(run(small_reopened(), request("r", (1,), max_tokens=3))["r"])) == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_requests_without_a_seed_get_theirs_from_the_engines(seed: int):
    requests = [request(f"r{n}", (1, 2), temperature=1.0, max_tokens=8) for n in range(3)]
    answers = [
        {name: ids_of(found) for name, found in run(small_reopened(seed=one), *requests).items()}
        for one in (seed, seed, seed + 1)
    ]
    assert answers[0] == answers[1] != answers[2]
    assert len({tuple(ids) for ids in answers[0].values()}) == 3
