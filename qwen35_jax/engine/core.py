"""Continuous batching: the Engine of engine/request.py over scheduler and runner.

A step plans and dispatches the next device step before it waits for the one before, so that the
host's work hides behind the device's. A sequence that a stop id ended has by then been planned once
more; what that step samples for it is dropped.
"""

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import jax

from qwen35_jax.compile_cache import CompileCounter
from qwen35_jax.engine.plan import Sequence
from qwen35_jax.engine.request import Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.runner import Collected, Dispatched, PromptLogprobs, Runner, SampledToken
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.engine.stats import EngineStats, HostSeconds, Stopwatch
from qwen35_jax.engine.stopping import check_prompt, ending_of
from qwen35_jax.errors import InvalidRequestError


@dataclass
class _Live:
    """A request from submission to its end. prompt_logprobs: found so far, by position."""

    sequence: Sequence
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_is_reported: bool = False


@dataclass
class ContinuousBatchingEngine:
    """Many requests at once. One thread drives it.

    vocabulary_size: ids at and above it are refused. stop_token_ids: the checkpoint's own ends.
    seed: where the seeds of requests that bring none come from. compile_counter: marked ready; the
    engine closes it.
    """

    runner: Runner
    scheduler: Scheduler
    vocabulary_size: int
    max_model_len: int
    stop_token_ids: frozenset[int]
    seed: int = 0
    compile_counter: CompileCounter | None = None
    _live: dict[str, _Live] = field(default_factory=dict)
    _running: Dispatched | None = None
    _ended: list[TokenOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self._watch = Stopwatch(perf_counter())
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._non_finite = self._device_failures = 0
        self._finished: Counter[str] = Counter()

    def submit(self, request: Request) -> None:
        check_prompt(request.prompt_token_ids, self.vocabulary_size, self.max_model_len)
        params = request.params
        for field_name in ("logit_bias", "stop_token_ids"):
            _check_ids(field_name, getattr(params, field_name), self.vocabulary_size)
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = min(room, params.max_tokens or room)
        if params.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but the context has room for {limit} tokens "
                "after this prompt",
                param="min_tokens",
            )
        why_not = self.scheduler.why_never_fits(len(request.prompt_token_ids), limit)
        if why_not is not None:
            raise InvalidRequestError(why_not, param="max_tokens")
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        own_stops = frozenset() if params.ignore_eos else self.stop_token_ids
        sequence = Sequence(
            request=request,
            seed=seed % 2**64,
            limit=limit,
            stop_ids=own_stops | frozenset(params.stop_token_ids or ()),
        )
        self.scheduler.add(sequence)
        self._live[request.request_id] = _Live(sequence)

    def abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._end(live.sequence, TokenOutput(request_id, finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self._live or self._ended)

    @property
    def in_flight(self) -> Dispatched | None:
        """The step that was dispatched and not yet collected: what a profile measures."""
        return self._running

    def step(self) -> list[TokenOutput]:
        counter = self.compile_counter
        try:
            with nullcontext() if counter is None else counter.watch():
                self._step()
        except jax.errors.JaxRuntimeError as error:
            self._device_failures += 1
            self._start_over(f"the device failed: {str(error).splitlines()[0]:.200}")
        except BaseException:
            # Ctrl-C, or a bug: the caches may be given away or half written.
            self._start_over("a step was interrupted")
            raise
        outputs, self._ended = self._ended, []
        return outputs

    def _step(self) -> None:
        watch = self._watch
        watch.start(perf_counter())
        plan = self.scheduler.plan()
        watch.mark("schedule", perf_counter())
        before, self._running = self._running, None
        if plan is not None:
            self._steps += 1
            self._prompt_tokens += sum(piece.count for piece in plan.pieces)
            batch = self.runner.build(plan)
            watch.mark("build", perf_counter())
            self._running = self.runner.dispatch(batch)
            watch.mark("dispatch", perf_counter())
        if before is not None:
            collected = self.runner.collect(before)
            watch.mark("collect", perf_counter())
            self._take(collected)
            watch.mark("finish", perf_counter())
        elif plan is None and self._live:
            raise RuntimeError("requests wait and no step can run: the scheduler is stuck")

    def stats(self) -> EngineStats:
        scheduler, counter = self.scheduler, self.compile_counter
        page_size = scheduler.page_size
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            max_num_seqs=scheduler.max_num_seqs,
            kv_tokens=scheduler.num_pages * page_size,
            kv_tokens_used=(scheduler.num_pages - scheduler.num_free_pages) * page_size,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=scheduler.num_preemptions,
            non_finite=self._non_finite,
            device_failures=self._device_failures,
            compiles_after_ready=0 if counter is None else len(counter.late_programs),
            finished=dict(self._finished),
            host_seconds=HostSeconds(**self._watch.seconds),
        )

    def _start_over(self, reason: str) -> None:
        """End every request as "error" and go on with empty caches."""
        for live in list(self._live.values()):
            request_id = live.sequence.request_id
            self._end(live.sequence, TokenOutput(request_id, finish_reason="error", error=reason))
        self._running = None
        self.runner.reset()

    def close(self) -> None:
        """End what is left as "abort" and give the caches back."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._running = None
        self.runner.close()
        if self.compile_counter is not None:
            self.compile_counter.close()

    def _take(self, collected: Collected) -> None:
        for prompt in collected.prompts:
            self._take_prompt(prompt)
        for token in collected.tokens:
            live = self._live.get(token.sequence.request.request_id)
            # It ended while the step ran.
            if live is not None and live.sequence is token.sequence:
                self._take_token(live, token)

    def _take_prompt(self, prompt: PromptLogprobs) -> None:
        live = self._live.get(prompt.sequence.request.request_id)
        if live is not None and live.sequence is prompt.sequence:
            live.prompt_logprobs.update(enumerate(prompt.entries, prompt.start))

    def _take_token(self, live: _Live, token: SampledToken) -> None:
        sequence = live.sequence
        request_id = sequence.request.request_id
        if token.token_id is None:
            self._non_finite += 1
            self._end(
                sequence,
                TokenOutput(
                    request_id,
                    finish_reason="error",
                    error="the model's logits are not finite numbers",
                ),
            )
            return
        self._generation_tokens += 1
        self.scheduler.results_in(sequence, token.token_id)
        finish, stop_reason = ending_of(sequence, token.token_id)
        output = TokenOutput(
            request_id,
            (token.token_id,),
            None if token.logprobs is None else (token.logprobs,),
            finish,
            stop_reason,
            prompt_logprobs=self._report_prompt(live),
        )
        if finish is None:
            self._ended.append(output)
        else:
            self._end(sequence, output)

    def _report_prompt(self, live: _Live) -> tuple[TokenLogprobs | None, ...] | None:
        """With the first token, once."""
        request = live.sequence.request
        if request.params.prompt_logprobs is None or live.prompt_is_reported:
            return None
        live.prompt_is_reported = True
        length = len(request.prompt_token_ids)
        return (None, *(live.prompt_logprobs[position] for position in range(1, length)))

    def _end(self, sequence: Sequence, output: TokenOutput) -> None:
        assert output.finish_reason is not None
        self._finished[output.finish_reason] += 1
        self.scheduler.finish(sequence)
        del self._live[sequence.request.request_id]
        self._ended.append(output)


def _check_ids(name: str, ids: object, vocabulary_size: int) -> None:
    """stop_token_ids are ids, logit_bias (id, bias) pairs."""
    for one in ids or ():  # pyright: ignore[reportGeneralTypeIssues]
        token_id = one[0] if isinstance(one, tuple) else one
        if token_id >= vocabulary_size:
            raise InvalidRequestError(
                f"{name} holds token id {token_id}; the vocabulary has {vocabulary_size} ids",
                param=name,
            )
