"""A simple engine: takes what waits as one batch, runs it to its end, then takes the next.

Rows of a batch share every step. A row that has finished rides along until the last one has.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.engine.stopping import check_prompt
from qwen35_jax.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from qwen35_jax.model.cache import ModelState, init_state
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.sampler import Sampled, SamplingArrays, SamplingMode
from qwen35_jax.step import Step

# Prompt tokens in one prefill call, over all rows; bounds its activations.
PREFILL_TOKENS = 8192
MIN_PIECE = 16
MIN_CAPACITY = 256


@dataclass
class Row:
    """One running request. limit: tokens it may generate."""

    request: Request
    seed: int
    limit: int
    generated: int = 0
    finished: bool = False


@dataclass
class Batch:
    """The rows that run together and their device arrays. Rows beyond `rows` are padding."""

    rows: list[Row]
    state: ModelState
    sampled: Sampled
    options: SamplingArrays
    mode: SamplingMode
    with_logprobs: bool


@dataclass
class StaticBatchEngine:
    """The Engine of engine/request.py by static batches.

    max_model_len: prompt and output tokens of one sequence at most. stop_token_ids: the
    checkpoint's own ends. vocabulary_size: ids at and above it are refused and never sampled.
    seed: where the seeds of requests that bring none come from.
    """

    params: Qwen35
    vocabulary_size: int
    max_model_len: int
    max_num_seqs: int
    stop_token_ids: frozenset[int]
    seed: int = 0
    _waiting: dict[str, Row] = field(default_factory=dict)  # first come, first served
    _batch: Batch | None = None
    _ended: list[TokenOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self._step = Step(self.params, self.vocabulary_size)

    def submit(self, request: Request) -> None:
        check_prompt(request.prompt_token_ids, self.vocabulary_size, self.max_model_len)
        seed = request.params.seed
        room = self.max_model_len - len(request.prompt_token_ids)
        self._waiting[request.request_id] = Row(
            request=request,
            seed=self._seeds.getrandbits(64) if seed is None else seed,
            limit=min(room, request.params.max_tokens or room),
        )

    def abort(self, request_id: str) -> None:
        row = self._waiting.pop(request_id, None)
        if row is not None:
            self._end_early(row, "abort")
            return
        for row in self._batch.rows if self._batch else []:
            if row.request.request_id == request_id and not row.finished:
                self._end_early(row, "abort")
        self._drop_finished_batch()

    def has_work(self) -> bool:
        return bool(self._waiting or self._batch or self._ended)

    def step(self) -> list[TokenOutput]:
        outputs, self._ended = self._ended, []
        if self._batch is None and not self._waiting:
            return outputs
        rows = self._batch.rows if self._batch else self._take_waiting()
        try:
            outputs += self._decode(self._batch) if self._batch else self._start_batch(rows)
        except jax.errors.JaxRuntimeError as error:
            # Most likely out of memory: these requests end, the engine goes on.
            for row in rows:
                if not row.finished:
                    self._end_early(row, "error", f"the device failed: {_first_line(error)}")
            outputs, self._ended = outputs + self._ended, []
            self._batch = None
        self._drop_finished_batch()
        return outputs

    def close(self) -> None:
        rows = [*self._waiting.values(), *(self._batch.rows if self._batch else [])]
        for row in rows:
            if not row.finished:
                self._end_early(row, "abort")
        self._waiting.clear()
        self._batch = None

    def _take_waiting(self) -> list[Row]:
        count = min(len(self._waiting), self.max_num_seqs)
        return [self._waiting.pop(request_id) for request_id in list(islice(self._waiting, count))]

    def _drop_finished_batch(self) -> None:
        """Give its device memory back now, not when the next request comes."""
        if self._batch and all(row.finished for row in self._batch.rows):
            self._batch = None

    def _start_batch(self, rows: list[Row]) -> list[TokenOutput]:
        padded = _power_of_two(len(rows))
        capacity = max(len(row.request.prompt_token_ids) + row.limit for row in rows)
        params = [row.request.params for row in rows]
        batch = self._batch = Batch(
            rows=rows,
            state=init_state(
                self.params.config, padded, max(MIN_CAPACITY, _power_of_two(capacity))
            ),
            sampled=Sampled(jnp.zeros((padded,), jnp.int32)),
            options=_sampling_arrays(rows, padded),
            mode=_sampling_mode(rows),
            with_logprobs=any(one.logprobs is not None for one in params),
        )
        logits = self._prefill(batch, [row.request.prompt_token_ids for row in rows], padded)
        batch.sampled = self._step.sample(
            logits, batch.options, mode=batch.mode, with_logprobs=batch.with_logprobs
        )
        return self._collect(batch)

    def _prefill(self, batch: Batch, prompts: list[tuple[int, ...]], padded: int) -> jax.Array:
        longest = max(len(prompt) for prompt in prompts)
        piece = min(_power_of_two(longest), max(MIN_PIECE, PREFILL_TOKENS // padded))
        piece = max(MIN_PIECE, piece)
        logits = jnp.zeros((padded, self.params.config.vocab_size), jnp.float32)
        for start in range(0, longest, piece):
            ids = np.zeros((padded, piece), np.int32)
            lengths = np.zeros((padded,), np.int32)
            for index, prompt in enumerate(prompts):
                part = prompt[start : start + piece]
                ids[index, : len(part)] = part
                lengths[index] = len(part)
            batch.state, logits = self._step.prefill(
                batch.state, logits, jnp.asarray(ids), jnp.asarray(lengths)
            )
        return logits

    def _decode(self, batch: Batch) -> list[TokenOutput]:
        batch.options = replace(batch.options, step=batch.options.step + 1)
        batch.state, batch.sampled = self._step.decode(
            batch.state,
            batch.sampled.tokens,
            batch.options,
            mode=batch.mode,
            with_logprobs=batch.with_logprobs,
        )
        return self._collect(batch)

    def _collect(self, batch: Batch) -> list[TokenOutput]:
        """Wait for the step's ids and hand them out. The only place that waits on the device."""
        sampled: Sampled = jax.device_get(batch.sampled)
        return [
            self._advance(row, index, sampled)
            for index, row in enumerate(batch.rows)
            if not row.finished
        ]

    def _advance(self, row: Row, index: int, sampled: Sampled) -> TokenOutput:
        params = row.request.params
        token = int(sampled.tokens[index])
        row.generated += 1
        finish: FinishReason | None = None
        ends = token in (params.stop_token_ids or ())
        if ends or (token in self.stop_token_ids and not params.ignore_eos):
            finish = "stop"
        elif row.generated >= row.limit:
            finish = "length"
        row.finished = finish is not None
        logprobs = None
        if params.logprobs is not None:
            logprobs = (_logprobs(sampled, index, params.logprobs),)
        return TokenOutput(
            request_id=row.request.request_id,
            token_ids=(token,),
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=token if finish == "stop" else None,
        )

    def _end_early(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        row.finished = True
        self._ended.append(TokenOutput(row.request.request_id, finish_reason=reason, error=error))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _sampling_mode(rows: list[Row]) -> SamplingMode:
    params = [row.request.params for row in rows]
    if all(one.greedy for one in params):
        return "greedy"
    if all(one.top_k == 0 and one.top_p == 1.0 and one.min_p == 0.0 for one in params):
        return "unfiltered"
    return "filtered"


def _sampling_arrays(rows: list[Row], padded: int) -> SamplingArrays:
    params = [row.request.params for row in rows]

    def column(values: list[float], dtype: type) -> jax.Array:
        return jnp.asarray(np.resize(np.asarray(values, dtype), (padded,)))

    words = [[(row.seed >> 32) & 0xFFFFFFFF, row.seed & 0xFFFFFFFF] for row in rows]
    return SamplingArrays(
        temperature=column([_float32_temperature(one.temperature) for one in params], np.float32),
        top_k=column([min(one.top_k, 2**31 - 1) for one in params], np.int32),
        top_p=column([one.top_p for one in params], np.float32),
        min_p=column([one.min_p for one in params], np.float32),
        seed=jnp.asarray(np.resize(np.asarray(words, np.uint32), (padded, 2))),
        step=jnp.zeros((padded,), jnp.int32),
    )


def _float32_temperature(temperature: float) -> float:
    """Zero stays (greedy); anything else stays a normal float32."""
    limits = np.finfo(np.float32)
    return min(max(temperature, float(limits.tiny)), float(limits.max)) if temperature else 0.0


def _logprobs(sampled: Sampled, index: int, count: int) -> TokenLogprobs:
    assert sampled.token_logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    top = zip(sampled.top_ids[index, :count], sampled.top_logprobs[index, :count], strict=True)
    return TokenLogprobs(
        token=float(sampled.token_logprobs[index]),
        top=tuple((int(token_id), float(logprob)) for token_id, logprob in top),
    )
