"""An engine without a model, for tests and load tests of everything in front of the engine.

Its ids are a pure function of the prompt and the position, so the same request gives the same
answer whatever else runs beside it. It imports no jax.
"""

import struct
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from qwen35_jax.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.stats import EngineStats
from qwen35_jax.errors import InvalidRequestError


def hashed_id(prompt_token_ids: Sequence[int], position: int, vocabulary_size: int) -> int:
    """The id that FakeEngine generates at `position` (0 is the first new one) without a script."""
    values = (*prompt_token_ids, position)
    return zlib.crc32(struct.pack(f"<{len(values)}q", *values)) % vocabulary_size


@dataclass
class _Row:
    request: Request
    limit: int
    generated: int = 0


class FakeEngine:
    """Deterministic Engine: one token a step for each of at most `max_num_seqs` requests.

    vocabulary_size: ids are below it.
    script: a prompt's ids -> the ids to generate, whose last one repeats; None hashes the prompt.
    eos_token_ids: ids that end a request that does not ignore them.
    max_model_len: prompt and generated tokens together.
    max_num_seqs: requests that run at once; the others wait in order.
    seconds_per_step: how long a step sleeps.

    Log-probabilities fall by 1 a rank: -0.5 for the generated id, -1.5 for the id after it.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        script: Callable[[tuple[int, ...]], Sequence[int]] | None = None,
        eos_token_ids: Collection[int] = (),
        max_model_len: int = 4096,
        max_num_seqs: int = 16,
        seconds_per_step: float = 0.0,
    ):
        self._vocabulary_size = vocabulary_size
        self._script = script
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._seconds_per_step = seconds_per_step
        self._waiting: deque[_Row] = deque()
        self._running: dict[str, _Row] = {}
        self._aborted: list[str] = []
        self._closed = False
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter()

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError for an empty or too long one."""
        assert not self._closed, "submit on a closed engine"
        room = self._max_model_len - len(request.prompt_token_ids)
        if not request.prompt_token_ids:
            raise InvalidRequestError("prompt must hold at least one token", param="prompt")
        if room < 1:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens; "
                f"the context holds {self._max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        max_tokens = request.params.max_tokens
        self._waiting.append(_Row(request, limit=room if max_tokens is None else max_tokens))

    def abort(self, request_id: str) -> None:
        """End a request; the next step reports it."""
        waiting = next((r for r in self._waiting if r.request.request_id == request_id), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        elif self._running.pop(request_id, None) is None:
            return
        self._aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._aborted)

    def step(self) -> list[TokenOutput]:
        """One token for every running request, after letting waiting ones in."""
        self._steps += 1
        outputs = [TokenOutput(request_id, finish_reason="abort") for request_id in self._aborted]
        if self._aborted:
            self._finished["abort"] += len(self._aborted)
        self._aborted.clear()
        while self._waiting and len(self._running) < self._max_num_seqs:
            row = self._waiting.popleft()
            self._running[row.request.request_id] = row
            self._prompt_tokens += len(row.request.prompt_token_ids)
        if self._running and self._seconds_per_step:
            time.sleep(self._seconds_per_step)
        for request_id, row in tuple(self._running.items()):
            output = self._advance(row)
            self._generation_tokens += 1
            if output.finish_reason is not None:
                self._finished[output.finish_reason] += 1
                del self._running[request_id]
            outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            max_num_seqs=self._max_num_seqs,
            kv_tokens=self._max_num_seqs * self._max_model_len,
            kv_tokens_used=sum(
                len(row.request.prompt_token_ids) + row.generated for row in self._running.values()
            ),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=0,
            non_finite=0,
            device_failures=0,
            compiles_after_ready=0,
            finished=dict(self._finished),
        )

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._aborted.clear()
        self._closed = True

    def _advance(self, row: _Row) -> TokenOutput:
        token_id = self._next_id(row)
        row.generated += 1
        finish_reason: FinishReason | None = None
        stop_reason = None
        params = row.request.params
        if token_id in tuple(params.stop_token_ids or ()) or (
            token_id in self._eos_token_ids and not params.ignore_eos
        ):
            finish_reason, stop_reason = "stop", token_id
        elif row.generated == row.limit:
            finish_reason = "length"
        return TokenOutput(
            row.request.request_id,
            (token_id,),
            logprobs=None if params.logprobs is None else (self._rank(token_id, params.logprobs),),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _next_id(self, row: _Row) -> int:
        prompt = row.request.prompt_token_ids
        if self._script is None:
            return hashed_id(prompt, row.generated, self._vocabulary_size)
        ids = self._script(prompt)
        return ids[min(row.generated, len(ids) - 1)]

    def _rank(self, token_id: int, count: int) -> TokenLogprobs:
        top = tuple(
            ((token_id + rank) % self._vocabulary_size, -0.5 - rank) for rank in range(count)
        )
        return TokenLogprobs(token=-0.5, top=top)
