"""The scheduler's rules for submission, prompts and ends, each alone."""

import pytest

from qwen35_jax.engine.plan import CHUNK, Sequence
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.errors import ConfigError, InvalidRequestError
from tests.support.simulated_core import (
    alone,
    decoded,
    fed,
    make_core,
    make_scheduler,
    make_sequence,
    submit,
)


def add(scheduler: Scheduler, request_id: str, length: int, limit: int) -> Sequence:
    sequence = make_sequence(request_id, length, limit)
    scheduler.add(sequence)
    return sequence


# Options and submission.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_num_seqs": 33, "max_num_batched_tokens": 32},
            r"max_num_batched_tokens must be at least max_num_seqs \(33\)",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"num_slots": 1}, "num_slots must be at least 2"),
        ({"page_size": 0}, "page_size"),
        ({"max_chunks": 0}, "max_chunks"),
        ({"max_passes": -1}, "max_passes"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(changes: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        make_scheduler(**changes)


def test_what_can_never_fit_is_told_before_it_is_queued():
    scheduler = make_scheduler(num_pages=11, page_size=4, max_model_len=64)
    assert scheduler.why_never_fits(40, 1) is None
    assert scheduler.why_never_fits(30, 11) is None
    assert "KV cache of 40 tokens" in (scheduler.why_never_fits(30, 12) or "")
    assert "context of 64 tokens" in (scheduler.why_never_fits(60, 5) or "")


@pytest.mark.parametrize(("length", "limit"), [(40, 1), (1, 40), (30, 11), (4, 37)])
def test_what_just_fits_alone_runs_to_its_limit(length: int, limit: int):
    core = make_core(num_pages=11)
    (sequence,) = submit(core, (length, limit))
    core.run()
    assert core.ended["0"] == ("length", alone(sequence))
    assert core.scheduler.num_preemptions == 0


def test_a_request_id_in_the_engine_is_refused_and_free_again_after_the_end():
    scheduler = make_scheduler()
    first = add(scheduler, "a", 3, 3)
    with pytest.raises(InvalidRequestError, match="'a' is in the engine already"):
        add(scheduler, "a", 5, 5)
    assert scheduler.abort("a") is first
    add(scheduler, "a", 5, 5)
    scheduler.check_invariants()


# Prompts in pieces, beside decodes.


def test_a_prompt_is_fed_in_pieces_of_whole_chunks_and_the_last_one_samples():
    core = make_core(max_num_batched_tokens=317)
    submit(core, (300, 2), (20, 2))
    assert fed(core.step()) == [("0", 0, 300, True)]
    assert fed(core.step()) == [("1", 0, 20, True)]
    core = make_core(max_num_batched_tokens=200)
    submit(core, (300, 2), (8, 2))
    # What a cut piece leaves free goes to a prompt that ends in it.
    assert fed(core.step()) == [("0", 0, 192, False), ("1", 0, 8, True)]
    assert fed(core.step()) == [("0", 192, 108, True)]
    core.run()
    assert core.ended.keys() == {"0", "1"}


def test_a_prompt_is_not_begun_with_a_part_of_a_chunk_while_another_is_fed():
    core = make_core(max_num_batched_tokens=100)
    submit(core, (80, 2), (80, 2))
    assert fed(core.step()) == [("0", 0, 80, True)]
    assert fed(core.step()) == [("1", 0, 80, True)]


def test_a_budget_below_a_chunk_still_feeds_prompts():
    core = make_core(max_num_batched_tokens=9, max_num_seqs=8)
    submit(core, (4, 40), (4, 40), (20, 2))
    assert fed(core.step()) == [("0", 0, 4, True), ("1", 0, 4, True)]
    pieces = [fed(core.step()) for _ in range(3)]
    assert pieces == [[("2", 0, 7, False)], [("2", 7, 7, False)], [("2", 14, 6, True)]]


def test_chunks_of_a_step_are_limited():
    core = make_core(max_chunks=3)
    submit(core, (65, 1), (65, 1), (1, 1))
    # Two chunks, then one whole chunk of the next.
    assert fed(core.step()) == [("0", 0, 65, True), ("1", 0, CHUNK, False)]
    assert fed(core.step()) == [("1", CHUNK, 1, True), ("2", 0, 1, True)]


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_fed():
    core = make_core(max_num_batched_tokens=66, num_pages=301)
    submit(core, (2, 30), (2, 30), (700, 3))
    core.step()
    steps = [core.step() for _ in range(11)]
    assert [decoded(step) for step in steps] == [["0", "1"]] * 11
    assert all(fed(step) for step in steps)
    assert decoded(core.step()) == ["0", "1", "2"]


def test_first_come_is_first_served():
    core = make_core(max_num_seqs=2, num_slots=3)
    submit(core, *[(5, 3)] * 6)
    core.run()
    starts = [piece[0] for plan in core.plans if plan.pieces for piece in fed(plan)]
    assert starts == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("changes", [{"max_num_seqs": 3}, {"num_slots": 4}])
def test_rows_and_slots_limit_what_runs_at_once(changes: dict[str, int]):
    core = make_core(**changes)
    submit(core, *[(5, 9)] * 5)
    core.step()
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (3, 2)
    core.run()
    assert max(len(plan.decodes) for plan in core.plans) == 3


# Ends.


def test_a_sequence_whose_last_token_is_in_flight_is_not_planned():
    core = make_core()
    submit(core, (5, 1), (5, 3))
    assert [piece[0] for piece in fed(core.step())] == ["0", "1"]
    assert decoded(core.step()) == ["1"]
    assert core.ended["0"][0] == "length"
    assert decoded(core.step()) == ["1"]
    assert core.step() is None
    assert core.ended["1"][0] == "length"


def test_a_sequence_goes_on_before_the_host_knows_that_it_stopped():
    core = make_core(num_slots=2)
    first = make_sequence("a", 5, 9)
    stopped = make_sequence("a", 5, 9, stop_ids=alone(first)[:1])
    core.submit(stopped)
    core.submit(make_sequence("b", 5, 2))
    core.step()
    assert decoded(core.step()) == ["a"]
    assert core.ended["a"] == ("stop", alone(stopped))
    # The slot and the pages of "a" go to "b" while the device still runs "a".
    assert fed(core.step()) == [("b", 0, 5, True)]
    core.run()
    assert core.ended["a"] == ("stop", alone(stopped))
    assert core.ended["b"] == ("length", alone(make_sequence("b", 5, 2)))


def test_plan_is_none_without_work_and_while_all_tokens_are_in_flight():
    scheduler = make_scheduler()
    assert scheduler.plan() is None and not scheduler.has_work
    sequence = add(scheduler, "a", 3, 1)
    assert scheduler.plan() is not None
    assert scheduler.plan() is None and scheduler.has_work
    scheduler.results_in(sequence, 7)
    assert sequence.generated == [7] and sequence.in_flight == 0
    scheduler.finish(sequence)
    assert not scheduler.has_work and scheduler.num_free_pages == scheduler.num_pages


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_frees_pages_and_slot_at_once(steps: int):
    core = make_core(max_num_batched_tokens=70)
    submit(core, (100, 9), (3, 5))
    for _ in range(steps):
        core.step()
    core.abort("0")
    core.scheduler.check_invariants()
    core.abort("1")
    assert core.scheduler.num_free_pages == core.scheduler.num_pages
    assert core.scheduler.num_free_slots == 8
    assert not core.scheduler.has_work
    core.run()


def test_abort_of_a_waiting_sequence_lets_the_next_one_in():
    core = make_core(max_num_seqs=1)
    submit(core, (5, 2), (5, 2), (5, 2))
    core.step()
    core.abort("1")
    core.run()
    assert core.ended["1"] == ("abort", [])
    assert core.ended["2"][0] == "length"


def test_abort_of_an_unknown_request_does_nothing():
    scheduler = make_scheduler()
    add(scheduler, "a", 3, 1)
    assert scheduler.abort("b") is None
    assert scheduler.num_waiting == 1
