"""The seam between the engine and its doors: what goes in, what one step gives back. No jax here.

A door (LLM, the CLI, the HTTP server) submits a Request of token ids and gets TokenOutputs until
one carries a finish_reason. Text, stop strings and formats are the door's side of the seam.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from qwen35_jax.engine.stats import EngineStats
from qwen35_jax.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, of the raw model.

    token: that of the chosen token. top: (id, log-probability) of the likeliest tokens, best
    first; as many as SamplingParams.logprobs asked for.
    """

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Request:
    """One sequence to generate. `request_id` is unique among the requests in the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class TokenOutput:
    """What one step gave one request.

    token_ids: the new ids. A stop id that ended the request is the last of them.
    logprobs: one entry a new id when they were asked for.
    finish_reason: set in the request's last output, and only there.
    stop_reason: the stop id that ended the request, if one did.
    error: what went wrong, when finish_reason is "error".
    prompt_logprobs: with the first token when they were asked for: one entry a prompt token, the
        first None.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Engine(Protocol):
    """Generates tokens for many requests. One thread drives it: nothing here is thread-safe."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError for one that can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early; its last output has finish_reason "abort". Unknown ids are fine."""
        ...

    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        ...

    def step(self) -> list[TokenOutput]:
        """Run one step; returns the outputs of every request that it moved."""
        ...

    def stats(self) -> EngineStats:
        """Counts of requests, tokens and steps."""
        ...

    def close(self) -> None:
        """Give back device memory. Requests still there end as "abort"; the engine is done."""
        ...
