"""What scheduler, runner and core speak about: sequences, and what one step does. No jax here.

A sequence's tokens stand at positions 0, 1, ...; the prompt's come first. Processing a token puts
its keys and values into the page of its position and moves the recurrent state of its slot on.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from qwen35_jax.engine.request import Request

# Prompts reach the device in chunks of this many positions. A chunk holds one sequence's tokens;
# only the last chunk of a piece may be partly filled.
CHUNK = 64


@dataclass(eq=False, slots=True)
class Sequence:
    """The host's view of one request in the engine.

    seed: 64 bits. limit: tokens that it may generate over its life, cut to the context already.
    stop_ids: ids that end it. generated: the ids that the host has seen. in_flight: tokens sampled
    by planned steps whose results are not in yet. computed: positions processed, those of planned
    steps included. prefill_target: tokens known when it was admitted; below them it feeds its
    prompt. slot, pages: what it owns while it runs; page i holds positions i * page_size and on.
    arrival, passes: the scheduler's, its place in the queue and how often others went before it.
    """

    request: Request
    seed: int
    limit: int
    stop_ids: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    in_flight: int = 0
    computed: int = 0
    prefill_target: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    arrival: int = -1
    passes: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens that the host knows: the prompt and what it has seen generated."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def known_token_ids(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.generated]

    @property
    def num_sampled(self) -> int:
        """Tokens generated, those in flight included."""
        return len(self.generated) + self.in_flight

    @property
    def num_life_positions(self) -> int:
        """Positions that it processes if it runs to its limit: its last token is never fed back."""
        return len(self.request.prompt_token_ids) + self.limit - 1

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prefill_target


class Decode(NamedTuple):
    """One row: process the sequence's last token, which stands at `position`, sample the next."""

    sequence: Sequence
    position: int


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Process the known tokens [start, start + count); `samples`: and sample the next.

    start == 0: the sequence was admitted by this plan, for the first time or again; whatever its
    slot and its pages hold is not its own.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def num_chunks(self) -> int:
        return -(-self.count // CHUNK)


@dataclass(frozen=True)
class StepPlan:
    """One step. A sequence is in `decodes` or in `pieces`, once; those in `preempted` in neither.

    Dispatch it before anything else is asked of the scheduler: sequences hold their pages as of
    this step.
    """

    decodes: tuple[Decode, ...]
    pieces: tuple[PromptPiece, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(piece.count for piece in self.pieces)

    @property
    def num_chunks(self) -> int:
        return sum(piece.num_chunks for piece in self.pieces)
