"""An engine core around the real scheduler, on a simulated device that remembers who wrote what.

The device works as the real one does: it sees a step's inputs when the step is dispatched, and the
host gets the results one step later. Every sampled token depends on what page and slot hold at that
time, so a page or a slot used wrongly fails here or gives other tokens than `alone`.
"""

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qwen35_jax.engine.plan import Sequence, StepPlan
from qwen35_jax.engine.request import FinishReason, Request
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.sampling_params import SamplingParams

VOCABULARY_SIZE = 50
PARAMS = SamplingParams()


def make_sequence(
    request_id: str, prompt_length: int, limit: int, stop_ids: Iterable[int] = ()
) -> Sequence:
    seed = zlib.crc32(request_id.encode())
    prompt = tuple((seed + place) % VOCABULARY_SIZE for place in range(prompt_length))
    request = Request(request_id, prompt, PARAMS)
    return Sequence(request=request, seed=seed, limit=limit, stop_ids=frozenset(stop_ids))


def make_scheduler(**changes: Any) -> Scheduler:
    options: dict[str, Any] = {
        "num_slots": 9,
        "num_pages": 101,
        "page_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 1024,
        "max_chunks": 8,
    }
    return Scheduler(**(options | changes))


def next_token(seed: int, tokens: list[int]) -> int:
    return zlib.crc32(bytes([len(tokens) % 251, *tokens[-4:]]), seed) % VOCABULARY_SIZE


def alone(sequence: Sequence) -> list[int]:
    """What the sequence generates when nothing else runs."""
    tokens = list(sequence.request.prompt_token_ids)
    while len(tokens) < sequence.prompt_length + sequence.limit:
        tokens.append(next_token(sequence.seed, tokens))
        if tokens[-1] in sequence.stop_ids:
            break
    return tokens[sequence.prompt_length :]


@dataclass
class _Slot:
    """owner: request id. tokens: the board. processed: positions that the state has seen."""

    owner: str
    tokens: list[int]
    processed: int = 0


@dataclass
class SimulatedDevice:
    page_size: int
    # (page, offset) -> (request id, position, token)
    cache: dict[tuple[int, int], tuple[str, int, int]] = field(default_factory=dict)
    slots: dict[int, _Slot] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """The tokens that the step samples."""
        sampled = []
        for sequence, position in plan.decodes:
            sampled.append((sequence, self._process(sequence, position, 1, samples=True)))
        for piece in plan.pieces:
            sequence = piece.sequence
            if piece.start == 0:
                assert sequence.slot is not None
                self.slots[sequence.slot] = _Slot(sequence.request_id, sequence.known_token_ids)
            token = self._process(sequence, piece.start, piece.count, samples=piece.samples)
            if piece.samples:
                sampled.append((sequence, token))
        return sampled

    def _process(self, sequence: Sequence, start: int, count: int, *, samples: bool) -> int:
        assert sequence.slot, "slot 0 is the padding's"
        assert 0 not in sequence.pages, "page 0 is the padding's"
        slot = self.slots[sequence.slot]
        request_id = sequence.request_id
        assert slot.owner == request_id and slot.processed == start, "the state is another's"
        for position in range(start, start + count):
            place = sequence.pages[position // self.page_size], position % self.page_size
            self.cache[place] = request_id, position, slot.tokens[position]
        end = slot.processed = start + count
        if not samples:
            return -1
        assert end == len(slot.tokens), "sampled inside the known tokens"
        read = [
            self.cache[page, offset]
            for page in sequence.pages[: -(-end // self.page_size)]
            for offset in range(self.page_size)
            if (page, offset) in self.cache
        ][:end]
        expected = [(request_id, position, token) for position, token in enumerate(slot.tokens)]
        assert read == expected, "another sequence wrote to its pages"
        slot.tokens.append(next_token(sequence.seed, slot.tokens))
        return slot.tokens[-1]


class SimulatedCore:
    """Submits, steps and aborts as the engine core does; `ended` holds each request's end."""

    def __init__(self, scheduler: Scheduler, page_size: int, *, check: bool = True):
        self.scheduler = scheduler
        self.device = SimulatedDevice(page_size)
        self.flight: deque[list[tuple[Sequence, int]]] = deque()
        self.live: dict[str, Sequence] = {}
        self.ended: dict[str, tuple[FinishReason, list[int]]] = {}
        self.plans: list[StepPlan] = []
        self._check = check

    def submit(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self.live[sequence.request_id] = sequence

    def step(self) -> StepPlan | None:
        """Plan and dispatch a step, then read the results of the one before."""
        plan = self.scheduler.plan()
        if plan is None:
            assert self.flight or not self.scheduler.has_work, "work waits and nothing runs"
        else:
            assert plan.decodes or plan.pieces
            if self._check:
                self.plans.append(plan)
                moved = [sequence for sequence, _ in plan.decodes]
                moved += [piece.sequence for piece in plan.pieces]
                assert len({*moved, *plan.preempted}) == len(moved) + len(plan.preempted)
            self.flight.append(self.device.run(plan))
        if len(self.flight) > 1 or plan is None:
            self.collect()
        if self._check:
            self.scheduler.check_invariants()
        return plan

    def collect(self) -> None:
        """Read the results of the earliest step in flight, if there is one."""
        for sequence, token_id in self.flight.popleft() if self.flight else ():
            if self.live.get(sequence.request_id) is not sequence:
                continue  # it has ended since
            self.scheduler.results_in(sequence, token_id)
            if token_id in sequence.stop_ids:
                self._end(sequence, "stop")
            elif len(sequence.generated) == sequence.limit:
                self._end(sequence, "length")

    def abort(self, request_id: str) -> None:
        sequence = self.scheduler.abort(request_id)
        assert sequence is self.live.pop(request_id, None)
        if sequence is not None:
            self.ended[request_id] = "abort", sequence.generated

    def fail(self, request_id: str) -> None:
        self._end(self.live[request_id], "error")

    def run(self, max_steps: int = 100_000) -> int:
        """Step until nothing is left; the number of steps."""
        steps = 0
        while self.scheduler.has_work or self.flight:
            self.step()
            steps += 1
            assert steps <= max_steps, "no end"
        return steps

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        del self.live[sequence.request_id]
        self.ended[sequence.request_id] = reason, sequence.generated


def make_core(**changes: Any) -> SimulatedCore:
    return SimulatedCore(make_scheduler(page_size=4, **changes), 4)


def submit(core: SimulatedCore, *lengths_and_limits: tuple[int, int]) -> list[Sequence]:
    """Sequences "0", "1", ... of these prompt lengths and limits."""
    sequences = [
        make_sequence(str(place), length, limit)
        for place, (length, limit) in enumerate(lengths_and_limits)
    ]
    for sequence in sequences:
        core.submit(sequence)
    return sequences


def decoded(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [sequence.request_id for sequence, _ in plan.decodes]


def fed(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [
        (piece.sequence.request_id, piece.start, piece.count, piece.samples)
        for piece in plan.pieces
    ]
