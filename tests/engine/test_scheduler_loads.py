"""What the scheduler's rules come to under any load: right tokens, pools as before, no stall."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from qwen35_jax.engine.plan import CHUNK, Sequence
from tests.support.simulated_core import (
    VOCABULARY_SIZE,
    SimulatedCore,
    alone,
    make_scheduler,
    make_sequence,
)


def check_end(core: SimulatedCore, sequence: Sequence) -> None:
    """Each request ends once, with the tokens that it has when it runs alone."""
    reason, generated = core.ended[sequence.request_id]
    expected = alone(sequence)
    if reason in ("abort", "error"):
        assert generated == expected[: len(generated)]
    else:
        assert generated == expected
        assert reason == ("stop" if expected[-1] in sequence.stop_ids else "length")


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of what a core does: submit, plan, results, abort, fail. The simulated device
    checks each step; `work waits and nothing runs` is an assertion of SimulatedCore.step."""

    @initialize(
        page_size=st.sampled_from([1, 3, 16]),
        num_pages=st.integers(2, 40),
        max_num_seqs=st.sampled_from([1, 3, 7]),
        num_slots=st.integers(2, 8),
        extra_budget=st.sampled_from([0, 1, 70, 317]),
        max_chunks=st.integers(1, 4),
        max_passes=st.integers(0, 4),
    )
    def start(self, page_size: int, max_num_seqs: int, extra_budget: int, **options: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_num_seqs + extra_budget
        self.max_chunks = options["max_chunks"]
        self.scheduler = make_scheduler(
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_tokens,
            max_model_len=200,
            **options,
        )
        self.core = SimulatedCore(self.scheduler, page_size)
        self.sequences: list[Sequence] = []
        self.baseline = self.pools()

    def pools(self) -> tuple[int, int]:
        return self.scheduler.num_free_pages, self.scheduler.num_free_slots

    @rule(
        prompt_length=st.one_of(st.integers(1, 12), st.integers(1, 190)),
        limit=st.integers(1, 40),
        stop_ids=st.sets(st.integers(0, VOCABULARY_SIZE - 1), max_size=3),
        count=st.integers(1, 6),
    )
    def submit(self, prompt_length: int, limit: int, stop_ids: set[int], count: int) -> None:
        if self.scheduler.why_never_fits(prompt_length, limit) is not None:
            return
        for _ in range(count):
            request_id = str(len(self.sequences))
            self.sequences.append(make_sequence(request_id, prompt_length, limit, stop_ids))
            self.core.submit(self.sequences[-1])

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            earliest = next(iter(self.core.live.values()), None)
            before = earliest and (earliest.computed, earliest.num_preemptions)
            plan = self.core.step()
            if plan is not None:
                assert plan.num_tokens <= self.max_tokens
                assert plan.num_chunks <= self.max_chunks
                assert self.scheduler.num_running <= self.max_num_seqs
            # The earliest of all gives way to nobody.
            if earliest and before and before[0]:
                assert earliest.num_preemptions == before[1]

    @rule()
    def read_results_early(self) -> None:
        self.core.collect()

    @precondition(lambda self: self.core.live)
    @rule(data=st.data(), fails=st.booleans())
    def end_early(self, data: st.DataObject, fails: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.core.live)))
        (self.core.fail if fails else self.core.abort)(request_id)

    @invariant()
    def the_books_agree(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.core.live)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        # Alone, one sequence moves in every step but those that wait for its results.
        positions = sum(s.prompt_length + s.limit for s in self.core.live.values())
        self.core.run(max_steps=10 + 3 * positions * (1 + len(self.core.live)))
        assert self.pools() == self.baseline
        for sequence in self.sequences:
            check_end(self.core, sequence)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30)


class Load:
    """Random requests into a core, which random aborts and errors end too."""

    def __init__(
        self,
        core: SimulatedCore,
        seed: int,
        *,
        queue: int,
        longest_prompt: int,
        longest_answer: int = 16,
    ):
        self.core = core
        self.random = random.Random(seed)
        self.sequences: list[Sequence] = []
        self._queue = queue
        self._longest_prompt = longest_prompt
        self._longest_answer = longest_answer

    def step(self) -> None:
        """Fill the queue up, end one early now and then, step."""
        scheduler, draw = self.core.scheduler, self.random
        while scheduler.num_waiting < self._queue:
            prompt_length = draw.randint(1, self._longest_prompt)
            limit = draw.randint(1, self._longest_answer)
            stop_ids = draw.sample(range(VOCABULARY_SIZE), draw.choice([0, 0, 5]))
            request_id = str(len(self.sequences))
            self.sequences.append(make_sequence(request_id, prompt_length, limit, stop_ids))
            self.core.submit(self.sequences[-1])
        if draw.random() < 0.02 and self.core.live:
            request_id = draw.choice(list(self.core.live))
            draw.choice([self.core.abort, self.core.fail])(request_id)
        self.core.step()


def make_loaded_core(*, page_size: int = 4, check: bool = True, **options: Any) -> SimulatedCore:
    scheduler = make_scheduler(page_size=page_size, **options)
    return SimulatedCore(scheduler, page_size, check=check)


def test_ten_thousand_requests_ended_in_every_way_leave_the_pools_as_at_the_start():
    # Case 42.
    core = make_loaded_core(num_slots=17, max_num_seqs=16, num_pages=61, check=False)
    load = Load(core, seed=0, queue=20, longest_prompt=12, longest_answer=40)
    scheduler = core.scheduler
    while len(load.sequences) < 10_000:
        load.step()
    core.run()
    scheduler.check_invariants()
    assert scheduler.num_free_pages == scheduler.num_pages == 60
    assert scheduler.num_free_slots == 16
    assert len(core.ended) == len(load.sequences)
    assert {reason for reason, _ in core.ended.values()} == {"stop", "length", "abort", "error"}
    assert scheduler.num_preemptions > 100
    for sequence in load.sequences:
        check_end(core, sequence)


def test_with_a_full_pool_work_that_waits_means_a_step():
    # Case 44. No stall: SimulatedCore.step asserts it of every call.
    core = make_loaded_core(page_size=1, num_slots=17, max_num_seqs=16, num_pages=1001)
    load = Load(core, seed=1, queue=12, longest_prompt=60, longest_answer=200)
    scheduler = core.scheduler
    use: list[float] = []
    steps_without_a_plan = 0
    for _ in range(2000):
        planned = len(core.plans)
        load.step()
        use.append(1 - scheduler.num_free_pages / scheduler.num_pages)
        # Tokens in flight take one step to come in: never two in a row go without a plan.
        steps_without_a_plan = 0 if len(core.plans) > planned else steps_without_a_plan + 1
        assert steps_without_a_plan <= 1
    assert sum(used >= 0.95 for used in use) > 0.7 * len(use)
    assert scheduler.num_preemptions > 100
    core.run()
    assert len(core.ended) == len(load.sequences)
    for sequence in load.sequences:
        check_end(core, sequence)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 7, 33])
@pytest.mark.parametrize("max_num_batched_tokens", [33, 317])
def test_odd_limits_hold_and_change_no_token(max_num_seqs: int, max_num_batched_tokens: int):
    core = make_loaded_core(
        num_slots=max_num_seqs + 1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=201,
        max_chunks=5,
    )
    load = Load(core, seed=2, queue=4, longest_prompt=400)
    for _ in range(300):
        load.step()
    core.run()
    assert max(len(plan.decodes) for plan in core.plans) <= max_num_seqs
    assert max(plan.num_tokens for plan in core.plans) <= max_num_batched_tokens
    assert max(plan.num_chunks for plan in core.plans) <= 5
    for plan in core.plans:
        # A piece that does not end its prompt fills its chunks, or is alone.
        cut = [piece for piece in plan.pieces if not piece.samples]
        assert all(piece.count % CHUNK == 0 for piece in cut) or len(plan.pieces) == 1
    for sequence in load.sequences:
        check_end(core, sequence)
