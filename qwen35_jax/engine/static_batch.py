"""A simple engine: takes what waits as one batch, runs it to its end, then takes the next.

Rows of a batch share every step. A row that has finished rides along until the last one has.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.stopping import check_prompt
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.model.cache import ModelState, init_state
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.sampler import Sampled
from qwen35_jax.sampling_arrays import SamplingArrays, options_of
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.step import Step

# Prompt tokens in one prefill call, over all rows; bounds its activations.
PREFILL_TOKENS = 8192
MIN_PIECE = 16
MIN_CAPACITY = 256
NOT_YET = (
    *("n", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "prompt_logprobs"),
)


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
    options: SamplingArrays
    sampled: Sampled | None = None


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
        refuse_unsupported(request.params)
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
        except BaseException:
            # Ctrl-C in the middle: the device's state is given away or half way, the step is lost.
            for row in rows:
                if not row.finished:
                    self._end_early(row, "error", "a step was interrupted")
            self._batch = None
            raise
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
        batch = self._batch = Batch(
            rows=rows,
            state=init_state(
                self.params.config, padded, max(MIN_CAPACITY, _power_of_two(capacity))
            ),
            options=_sampling_arrays(rows, padded),
        )
        logits = self._prefill(batch, [row.request.prompt_token_ids for row in rows], padded)
        batch.sampled = self._step.sample(logits, batch.options)
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
        assert batch.sampled is not None
        batch.options = replace(batch.options, step=batch.options.step + 1)
        batch.state, batch.sampled = self._step.decode(
            batch.state, batch.sampled.tokens, batch.options
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


def refuse_unsupported(params: SamplingParams) -> None:
    """Raise InvalidRequestError for an option that has no effect in this engine."""
    neutral = SamplingParams()
    for name in NOT_YET:
        if getattr(params, name) != getattr(neutral, name):
            raise InvalidRequestError(f"{name} is not supported yet; leave it out", param=name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _sampling_arrays(rows: list[Row], padded: int) -> SamplingArrays:
    # Nothing here bans stop ids: min_tokens is refused.
    options = [options_of(row.request.params, seed=row.seed, stop_ids=()) for row in rows]
    filler = SamplingArrays.greedy(padded - len(rows))
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *options)
    return jax.tree.map(lambda one, more: jnp.concatenate([one, more]), stacked, filler)


def _logprobs(sampled: Sampled, index: int, count: int) -> TokenLogprobs:
    top = zip(sampled.top_ids[index, :count], sampled.top_logprobs[index, :count], strict=True)
    return TokenLogprobs(
        token=float(sampled.token_logprobs[index]),
        top=tuple((int(token_id), float(logprob)) for token_id, logprob in top),
    )
