"""The scheduler's rules for pages: admission, passing, growth and preemption, each alone."""

import pytest

from tests.support.simulated_core import (
    SimulatedCore,
    alone,
    decoded,
    fed,
    make_core,
    make_scheduler,
    make_sequence,
    submit,
)

# Pages: admission and passing.


def test_admission_leaves_a_page_for_each_running_sequence_that_may_grow():
    # A prompt of 7 takes 2 pages, 1 more token included; the limit makes it 5 pages over its life.
    core = make_core(num_pages=7)
    submit(core, (7, 12), (7, 12), (3, 2))
    core.step()
    # 4 pages are taken; the two left are the reserve of the two that run.
    assert core.scheduler.num_running == 2
    # Those that never need another page need no reserve.
    core = make_core(num_pages=6)
    submit(core, (7, 2), (7, 2), (4, 1))
    core.step()
    assert core.scheduler.num_running == 3


def test_admission_takes_the_page_of_the_first_decode_unless_there_is_none():
    core = make_core(num_pages=11)
    submit(core, (8, 2), (8, 1))
    core.step()
    assert [len(core.live[request_id].pages) for request_id in "01"] == [3, 2]


def test_small_ones_pass_one_that_lacks_pages():
    # Case 43: ten small ones and a big one that waits for pages.
    core = make_core(num_pages=21, num_slots=17, max_num_seqs=16)
    submit(core, (40, 30), (50, 9), *[(3, 2)] * 10)
    core.step()
    assert [piece[0] for piece in fed(core.plans[0])][:2] == ["0", "2"]
    while "1" not in core.ended:
        core.step()
    started = [piece[0] for plan in core.plans if plan.pieces for piece in fed(plan)]
    assert sorted(started[:-1], key=int) == sorted({"0", *map(str, range(2, 12))}, key=int)
    assert started[-1] == "1"
    assert core.scheduler.num_passes == 10


@pytest.mark.parametrize("max_passes", [0, 1, 5])
def test_one_that_lacks_pages_is_passed_a_bounded_number_of_times(max_passes: int):
    # New small ones come with every step, enough to keep the pool full for ever.
    core = make_core(num_pages=21, max_num_seqs=8, max_passes=max_passes)
    submit(core, (30, 30), (70, 9))
    big = core.live["1"]
    steps = 0
    while not big.is_running and steps < 200:
        core.submit(make_sequence(f"small {steps}", 3, 6))
        core.step()
        steps += 1
    assert core.scheduler.num_passes == max_passes == big.passes
    # The one before it runs for 30 steps, small ones for 6.
    assert steps < 40


def test_those_that_pass_in_one_step_are_counted_one_by_one():
    core = make_core(num_pages=21, max_passes=3)
    submit(core, (30, 9), (70, 9), *[(3, 2)] * 7)
    core.step()
    assert [piece[0] for piece in fed(core.plans[0])] == ["0", "2", "3", "4"]


@pytest.mark.parametrize(("blocked", "passes"), [(3, 0), (2, 1)])
def test_those_that_may_pass_are_looked_for_within_a_bound(blocked: int, passes: int):
    core = make_core(num_pages=21, max_passes=2)
    submit(core, (30, 9), *[(70, 9)] * blocked, (3, 2))
    core.step()
    assert core.scheduler.num_passes == passes


def test_nothing_passes_one_that_lacks_only_a_row():
    core = make_core(max_num_seqs=1)
    submit(core, (300, 5), (300, 5), (3, 2))
    core.run()
    assert core.scheduler.num_passes == 0
    assert list(core.ended) == ["0", "1", "2"]


# Pages: growth and preemption.


def test_the_latest_arrival_gives_way_once_its_tokens_are_in():
    # 6 pages; both begin with 2 and grow to 5.
    core = make_core(num_pages=7)
    early, late = submit(core, (7, 12), (7, 12))
    steps = []
    while not core.scheduler.num_preemptions:
        steps.append(core.step())
    # "0" lacked a page while a token of "1" was in flight: neither could go on for a step.
    assert [decoded(steps[-3]), steps[-2], decoded(steps[-1])] == [["0", "1"], None, ["0"]]
    assert core.plans[-1].preempted == (late,)
    assert late.num_preemptions == 1 and late.pages == [] and late.slot is None
    assert late.computed == 0 and late.in_flight == 0 and len(late.generated) > 0
    generated = len(late.generated)
    while not late.is_running:
        core.step()
    assert fed(core.plans[-1]) == [("1", 0, 7 + generated, True)]
    core.run()
    assert early.num_preemptions == 0
    assert core.ended == {"0": ("length", alone(early)), "1": ("length", alone(late))}


def test_the_others_go_on_while_one_lacks_a_page_and_the_latest_has_a_token_in_flight():
    # 9 pages, all taken when "1" needs its fourth; "0" has room in its third.
    core = make_core(num_pages=10)
    sequences = submit(core, (5, 14), (7, 14), (7, 14))
    steps = []
    while not core.scheduler.num_preemptions:
        steps.append(core.step())
    assert [decoded(step) for step in steps[-3:]] == [["0", "1", "2"], ["0"], ["0", "1"]]
    core.run()
    assert core.ended == {
        sequence.request_id: ("length", alone(sequence)) for sequence in sequences
    }


def test_a_preempted_sequence_goes_before_all_that_arrived_later():
    core = make_core(num_pages=7)
    submit(core, (7, 12), (7, 12), (23, 1), (7, 12))
    core.run()
    assert core.scheduler.num_preemptions > 0
    # "2" needs 6 pages: it would pass nobody; "3" came last.
    assert list(core.ended) == ["0", "1", "2", "3"]


def test_the_latest_arrival_keeps_its_pages_when_it_is_the_one_that_lacks_one():
    # 5 pages: "0" holds all 3 that it will ever need, "1" begins with 2 and needs a third.
    core = make_core(num_pages=6)
    early, late = submit(core, (9, 4), (7, 6))
    core.run()
    assert core.scheduler.num_preemptions == 0
    assert any(decoded(plan) == ["0"] for plan in core.plans if plan.decodes)
    assert core.ended == {"0": ("length", alone(early)), "1": ("length", alone(late))}


def test_one_that_still_feeds_its_prompt_gives_way_at_once():
    core = make_core(num_pages=40, max_num_batched_tokens=10)
    early, late = submit(core, (3, 60), (140, 2))
    while not late.num_preemptions:
        core.step()
    # No step went without "0".
    assert [decoded(plan) for plan in core.plans[1:]] == [["0"]] * (len(core.plans) - 1)
    assert late.generated == [] and core.plans[-1].preempted == (late,)
    core.run()
    assert core.ended == {"0": ("length", alone(early)), "1": ("length", alone(late))}


@pytest.mark.parametrize("generated", [1, 2, 8, 31, 127])
def test_preempted_after_any_number_of_tokens_the_ids_stay_the_same(generated: int):
    # Case 4. Pages of one token, so that a page more or less moves the end of the pool by a step:
    # "0" begins with 2, "1" with 149 and feeds its prompt for 3 steps.
    free_pages = max(1, 2 * (generated - 1))
    scheduler = make_scheduler(
        page_size=1, num_pages=1 + 2 + 149 + free_pages, max_num_batched_tokens=65
    )
    core = SimulatedCore(scheduler, page_size=1)
    early, late = submit(core, (1, generated + 10), (148, generated + 3))
    while not late.num_preemptions:
        core.step()
    assert len(late.generated) == generated
    core.run()
    assert late.num_preemptions == scheduler.num_preemptions == 1
    assert scheduler.num_admissions == 3
    assert core.ended == {"0": ("length", alone(early)), "1": ("length", alone(late))}
