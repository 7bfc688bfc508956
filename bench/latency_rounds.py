"""One round of requests through the engine in this process, and what its clock readings mean."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.stats import EngineStats, HostSeconds
from qwen35_jax.sampling_params import SamplingParams

Clock = Callable[[], float]


class SteppedEngine(Protocol):
    """What a round needs of ContinuousBatchingEngine."""

    @property
    def in_flight(self) -> Any: ...
    def submit(self, request: Request) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[TokenOutput]: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Step:
    """One call of step(): when it returned, what it left in flight, the host's time so far.

    rows: sequences that decode in the step in flight, 0 where it has prompt chunks too or there is
    none. context: tokens that a row attends to, the mean over rows. batch: the runner's Batch.
    """

    ended: float
    rows: int
    context: float
    host: HostSeconds
    batch: Any = None


@dataclass
class Timeline:
    """When one request was submitted, and when each of its tokens came."""

    submitted: float
    tokens: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.tokens[0] - self.submitted if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds from one token to the next, the mean; None for a single token."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


@dataclass(frozen=True)
class Round:
    """started, ended: of the whole round. preemptions: those of this round."""

    started: float
    ended: float
    timelines: dict[str, Timeline]
    steps: list[Step]
    preemptions: int = 0


@dataclass(frozen=True)
class Steady:
    """The steps where all rows decode and nothing else runs.

    seconds: median time of one. context: mean over steps and rows. host_us: microseconds of a step
    by HostSeconds' names, the mean. batch: the runner's Batch of the step in their middle.
    """

    steps: int
    seconds: float
    context: float
    host_us: dict[str, float]
    batch: Any


def random_requests(
    count: int,
    *,
    prompt_tokens: int,
    output_tokens: int,
    vocabulary_size: int,
    seed: int,
    sampling: Mapping[str, Any],
    name: str = "request",
) -> list[Request]:
    """Random ids, another prompt for each, and exactly so many tokens to generate."""
    stream = np.random.default_rng(seed)
    return [
        Request(
            f"{name}-{number}",
            tuple(stream.integers(0, vocabulary_size, prompt_tokens).tolist()),
            SamplingParams(
                max_tokens=output_tokens, ignore_eos=True, seed=seed + number, **sampling
            ),
        )
        for number in range(count)
    ]


def run_round(
    engine: SteppedEngine, requests: Sequence[Request], *, clock: Clock = perf_counter
) -> Round:
    """Submit all requests at once and step until they have ended."""
    preemptions = engine.stats().preemptions
    timelines: dict[str, Timeline] = {}
    steps: list[Step] = []
    started = clock()
    for request in requests:
        timelines[request.request_id] = Timeline(clock())
        engine.submit(request)
    ended = started
    while engine.has_work():
        outputs = engine.step()
        ended = clock()
        for output in outputs:
            note(timelines[output.request_id], output, ended)
        steps.append(step_of(engine, ended))
    return Round(started, ended, timelines, steps, engine.stats().preemptions - preemptions)


def note(timeline: Timeline, output: TokenOutput, now: float) -> None:
    timeline.tokens += [now] * len(output.token_ids)
    timeline.token_ids += output.token_ids
    if output.finish_reason is not None:
        timeline.finish_reason, timeline.error = output.finish_reason, output.error


def step_of(engine: SteppedEngine, ended: float) -> Step:
    in_flight, host = engine.in_flight, engine.stats().host_seconds
    if in_flight is None or in_flight.batch.size[1]:
        return Step(ended, 0, 0.0, host)
    batch = in_flight.batch
    rows = len(batch.sampling)
    positions = batch.packed.reshape(-1, 3)[:rows, 1]
    return Step(ended, rows, float(positions.mean()) + 1, host, batch)


def steady_part(steps: Sequence[Step], rows: int) -> Steady | None:
    """Of the steps that decode `rows` rows; None where there are none.

    The device step in flight when one call returned is what the next call waits for. Both that
    one and the one dispatched meanwhile must be such steps: then neither side does other work.
    """
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(steps)
        if before.rows == after.rows == rows
    ]
    if not pairs:
        return None
    hosts = [after.host - before.host for before, after in pairs]
    return Steady(
        steps=len(pairs),
        seconds=median(after.ended - before.ended for before, after in pairs),
        context=fmean(before.context for before, _ in pairs),
        host_us={
            one.name: 1e6 * fmean(getattr(host, one.name) for host in hosts)
            for one in fields(HostSeconds)
        },
        batch=pairs[len(pairs) // 2][0].batch,
    )


def round_figures(one: Round, *, output_tokens: int) -> dict[str, Any]:
    """The row's fields that the clock alone gives; milliseconds. Failed requests have no part in
    the means."""
    timelines = one.timelines.values()
    completed = [
        timeline
        for timeline in timelines
        if timeline.finish_reason == "length" and len(timeline.tokens) == output_tokens
    ]
    errors = sorted({timeline.error for timeline in timelines if timeline.error})
    seconds = one.ended - one.started
    tokens = sum(len(timeline.tokens) for timeline in completed)
    return {
        "ttft_ms": _mean_ms([timeline.ttft for timeline in completed]),
        "tpot_ms": _mean_ms([timeline.tpot for timeline in completed]),
        "output_tokens_per_s": round(tokens / seconds, 2) if seconds else None,
        "completed": len(completed),
        "failed": len(one.timelines) - len(completed),
        "preemptions": one.preemptions,
        **({"errors": errors} if errors else {}),
    }


def _mean_ms(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return round(1000 * fmean(known), 4) if known else None
