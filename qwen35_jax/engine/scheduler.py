"""Decides what each step does, and who owns which page and slot. No jax here.

A step decodes one token of every running sequence that is past its prompt; what the token budget
leaves goes to prompts, cut into pieces, first come first served.

Pages. A sequence is admitted when a slot is free and the pool holds the pages of its known tokens
and one more, beside a reserve of one page for each running sequence that may still grow. From then
on it takes pages as it grows. When none is free, the latest arrival gives way: its pages and its
slot go back, it returns to the queue at its place by arrival, and is computed again later. Tokens
in flight must reach the host first; until then it is left out of the plans, as is the sequence
that needs its page. The latest arrival itself keeps what it has and waits.

So the earliest arrival that runs is in every plan or has results in flight, and nothing but
finishing takes its pages: there is always progress.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from qwen35_jax.engine.id_pool import IdPool
from qwen35_jax.engine.plan import CHUNK, Decode, PromptPiece, Sequence, StepPlan
from qwen35_jax.errors import ConfigError, InvalidRequestError

MAX_PASSES = 32

_by_arrival = attrgetter("arrival")


class Scheduler:
    """Plans steps over waiting and running sequences.

    num_slots, num_pages: of the device's arrays; slot 0 and page 0 are padding. page_size:
    positions of a page. max_num_seqs: sequences that run at once (fewer where slots are fewer).
    max_num_batched_tokens: decodes and prompt tokens of one step. max_model_len: prompt and
    generated tokens of one sequence. max_chunks: prompt chunks of one step. max_passes: how many
    later arrivals may be admitted before one that lacks pages, and how far behind it they are
    looked for.

    Counters since the start: num_admissions (again after a preemption included), num_preemptions,
    num_passes.

    Raises ConfigError, naming the option.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_chunks: int,
        max_passes: int = MAX_PASSES,
    ):
        for name, value, least in (
            ("num_slots", num_slots, 2),
            ("num_pages", num_pages, 2),
            ("page_size", page_size, 1),
            ("max_num_seqs", max_num_seqs, 1),
            ("max_model_len", max_model_len, 1),
            ("max_chunks", max_chunks, 1),
            ("max_passes", max_passes, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), so that "
                f"every sequence can decode in every step, not {max_num_batched_tokens}; "
                "raise it or lower max_num_seqs"
            )
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self.max_chunks = max_chunks
        self._max_passes = max_passes
        self._pages = IdPool("page", num_pages)
        self._slots = IdPool("slot", num_slots)
        # Both in order of arrival.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_request_id: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_passes = 0

    @property
    def has_work(self) -> bool:
        return bool(self._by_request_id)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """Pages that sequences can own: all but the padding's."""
        return self._pages.num_ids

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    def why_never_fits(self, prompt_length: int, limit: int) -> str | None:
        """Why such a sequence could not run even alone, in one line; None where it could."""
        tokens = prompt_length + limit
        asked = f"{prompt_length} prompt tokens and {limit} to generate"
        if tokens > self._max_model_len:
            return f"{asked} are more than the context of {self._max_model_len} tokens"
        if self._pages_for(tokens - 1) > self._pages.num_ids:
            return (
                f"{asked} are more than the KV cache of {self._pages.num_ids * self.page_size} "
                "tokens; ask for fewer, or give the cache more memory"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, one that why_never_fits has nothing against.

        Raises InvalidRequestError for a request id that is waiting or running.
        """
        request_id = sequence.request_id
        if request_id in self._by_request_id:
            raise InvalidRequestError(
                f"request id {request_id!r} is in the engine already; give each request its own",
                param="request_id",
            )
        assert sequence.prompt_length >= 1 and sequence.limit >= 1, "nothing to compute"
        assert self.why_never_fits(sequence.prompt_length, sequence.limit) is None
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(sequence)
        self._by_request_id[request_id] = sequence

    def abort(self, request_id: str) -> Sequence | None:
        """Take a sequence out, waiting or running; its pages and slot are free at once.

        It may still be in steps in flight. Returns it, None where the id is unknown.
        """
        sequence = self._by_request_id.get(request_id)
        if sequence is not None:
            self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """As abort, for one whose results end it. What steps in flight still sample of it is the
        caller's to drop: the device runs in order, so they end before the next owner writes."""
        del self._by_request_id[sequence.request_id]
        queue = self._running if sequence.is_running else self._waiting
        index = bisect_left(queue, sequence.arrival, key=_by_arrival)
        assert queue[index] is sequence
        del queue[index]
        if sequence.is_running:
            self._release(sequence)

    def results_in(self, sequence: Sequence, token_id: int) -> None:
        """The host got the token that the earliest plan in flight sampled of a running sequence."""
        assert sequence.is_running and sequence.in_flight > 0, "no results are in flight"
        sequence.in_flight -= 1
        sequence.generated.append(token_id)

    def plan(self) -> StepPlan | None:
        """The next step, taken to be on its way from now on.

        None: nothing can run until results of earlier plans come in, or there is no work. A
        sequence goes on before the host knows whether the token in flight has ended it.
        """
        decodes: list[Decode] = []
        prefilling: list[Sequence] = []
        preempted: list[Sequence] = []
        held: Sequence | None = None
        # Preemption takes from the end of this list, always past the sequence at hand.
        for sequence in self._running:
            position = sequence.computed
            if position < sequence.prefill_target:
                prefilling.append(sequence)
                continue
            if sequence is held or sequence.num_sampled >= sequence.limit:
                continue
            if position == len(sequence.pages) * self.page_size:
                if not self._pages.num_free:
                    latest = self._running[-1]
                    if latest is sequence or latest.in_flight:
                        held = latest
                        continue
                    self._preempt(latest)
                    preempted.append(latest)
                sequence.pages += self._pages.allocate(1)
            sequence.computed = position + 1
            sequence.in_flight += 1
            decodes.append(Decode(sequence, position))

        room = _PromptRoom(self.max_num_batched_tokens - len(decodes), self.max_chunks)
        for sequence in prefilling:
            room.feed(sequence)
        # What has just given way must not come back for the pages that it leaves.
        if not preempted:
            self._admit(room)
        if not decodes and not room.pieces:
            return None
        return StepPlan(tuple(decodes), tuple(room.pieces), tuple(preempted))

    def check_invariants(self) -> None:
        """AssertionError where the books don't agree. Slow: for tests."""
        self._pages.check_invariants()
        self._slots.check_invariants()
        sequences = [*self._waiting, *self._running]
        for queue in (self._waiting, self._running):
            arrivals = [sequence.arrival for sequence in queue]
            assert arrivals == sorted(set(arrivals)), "a queue is out of order"
        assert {sequence.request_id: sequence for sequence in sequences} == self._by_request_id
        assert len(sequences) == len(self._by_request_id)
        assert len(self._running) <= self.max_num_seqs
        pages = [page for sequence in self._running for page in sequence.pages]
        slots = [sequence.slot for sequence in self._running]
        assert len(set(pages)) == len(pages) and set(pages) == self._pages.taken
        assert len(set(slots)) == len(slots) and set(slots) == self._slots.taken
        for sequence in self._waiting:
            assert not sequence.pages and not sequence.is_running
            assert sequence.computed == 0 and sequence.in_flight == 0
            assert len(sequence.generated) < sequence.limit
        for sequence in self._running:
            assert sequence.computed > 0, "admitted without a piece of its prompt"
            assert sequence.computed <= len(sequence.pages) * self.page_size
            assert len(sequence.pages) <= self._pages_for(sequence.num_life_positions)
            assert sequence.num_sampled <= sequence.limit
            if sequence.is_prefilling:
                assert sequence.in_flight == 0
                assert sequence.prefill_target == sequence.num_known
            else:
                assert sequence.computed == sequence.prompt_length + sequence.num_sampled - 1
        assert all(0 <= sequence.passes <= self._max_passes for sequence in sequences)

    def _admit(self, room: "_PromptRoom") -> None:
        """Start waiting sequences while slots, pages and the step's room last."""
        if not self._waiting or not self._has_a_row():
            return
        reserve = sum(map(self._may_grow, self._running))
        passed: list[Sequence] = []
        while len(passed) < len(self._waiting) and self._has_a_row():
            candidate = self._waiting[len(passed)]
            # The one that it would sample last needs no page.
            positions = min(candidate.num_known + 1, candidate.num_life_positions)
            num_pages = self._pages_for(positions)
            if num_pages + reserve > self._pages.num_free:
                if candidate.passes == self._max_passes or len(passed) == self._max_passes:
                    return
                passed.append(candidate)
                continue
            if not room.holds_a_piece_of(candidate.num_known):
                return
            del self._waiting[len(passed)]
            insort(self._running, candidate, key=_by_arrival)
            candidate.slot = self._slots.allocate(1)[0]
            candidate.pages = self._pages.allocate(num_pages)
            candidate.prefill_target = candidate.num_known
            room.feed(candidate)
            reserve += self._may_grow(candidate)
            self.num_admissions += 1
            self.num_passes += bool(passed)
            for sequence in passed:
                sequence.passes += 1
            if any(sequence.passes == self._max_passes for sequence in passed):
                return

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence is self._running[-1] and not sequence.in_flight
        self._running.pop()
        self._release(sequence)
        sequence.computed = sequence.prefill_target = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_by_arrival)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._pages.free(sequence.pages)
        self._slots.free([sequence.slot])
        sequence.pages = []
        sequence.slot = None

    def _has_a_row(self) -> bool:
        return len(self._running) < self.max_num_seqs and self._slots.num_free > 0

    def _may_grow(self, sequence: Sequence) -> bool:
        return len(sequence.pages) < self._pages_for(sequence.num_life_positions)

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)


@dataclass
class _PromptRoom:
    """The tokens and chunks that a step has left for prompts, and the pieces cut so far."""

    tokens: int
    chunks: int
    pieces: list[PromptPiece] = field(default_factory=list)

    def holds_a_piece_of(self, remaining: int) -> bool:
        return self._cut(remaining) > 0

    def feed(self, sequence: Sequence) -> None:
        """Cut the sequence's next piece, if there is room for one."""
        start = sequence.computed
        count = self._cut(sequence.prefill_target - start)
        if not count:
            return
        sequence.computed = start + count
        samples = not sequence.is_prefilling
        sequence.in_flight += samples
        piece = PromptPiece(sequence, start, count, samples)
        self.pieces.append(piece)
        self.tokens -= count
        self.chunks -= piece.num_chunks

    def _cut(self, remaining: int) -> int:
        """Tokens of the next piece. One that does not end its prompt fills its chunks, unless the
        step would then hold no piece at all."""
        room = min(self.tokens, self.chunks * CHUNK)
        if remaining <= room:
            return remaining
        return room // CHUNK * CHUNK or (0 if self.pieces else room)
