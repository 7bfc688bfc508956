"""Owns the device arrays and the compiled programs: a StepPlan in, sampled tokens out.

`build` is the host's alone, `dispatch` only queues work on the device, and `collect` is the one
place that waits for it.
"""

import logging
import os
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from qwen35_jax.engine.buckets import Buckets
from qwen35_jax.engine.plan import CHUNK, Sequence, StepPlan
from qwen35_jax.engine.request import TokenLogprobs
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.sampling_arrays import options_of
from qwen35_jax.step import (
    FIRST,
    LAST,
    SAMPLES,
    Logprobs,
    Sizes,
    StepResults,
    admit_program,
    init_engine_state,
    new_packed,
    packed_views,
    step_program,
)

logger = logging.getLogger(__name__)

SHORTEST_ADMISSION = 512
ADMISSION_STEP = 8


@dataclass(frozen=True)
class SampledToken:
    """What a step gave one sequence. token_id is None where its logits were not finite."""

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the prompt's tokens from `start` on, one entry each."""

    sequence: Sequence
    start: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True)
class Batch:
    """A plan in the shape that its program takes."""

    size: tuple[int, int]
    packed: np.ndarray
    # Sequences that begin.
    admitted: list[Sequence]
    # (sequence, place in the results) of all that sample, in the plan's order.
    sampling: list[tuple[Sequence, int]]
    # (sequence, first position, tokens, first chunk) of pieces whose log-probabilities are wanted.
    prompts: list[tuple[Sequence, int, int, int]]


@dataclass(frozen=True)
class Dispatched:
    """A step on its way."""

    batch: Batch
    results: StepResults


@dataclass(frozen=True)
class Collected:
    tokens: list[SampledToken]
    prompts: list[PromptLogprobs]


class Runner:
    """The device side of the engine. compile() must come before anything else."""

    def __init__(self, params: Qwen35, vocabulary_size: int, sizes: Sizes, buckets: Buckets):
        self._leaves = jax.tree.leaves(params)
        self._sizes = sizes
        self._buckets = buckets
        self._jitted = {
            key: step_program(params, *key, vocabulary_size)
            for key in [
                *((rows, 0) for rows in buckets.rows),
                *((buckets.max_rows, chunks) for chunks in buckets.chunks),
            ]
        }
        self._config = params.config
        self._admission_lengths = _admission_lengths(sizes.max_model_len)
        self._programs: dict[tuple[int, int], Any] = {}
        self._admissions: dict[int, Any] = {}
        self._state = init_engine_state(params.config, sizes)
        # What starting took, for reports.
        self.compile_seconds = self.rehearse_seconds = 0.0

    @property
    def num_programs(self) -> int:
        return len(self._jitted) + len(self._admission_lengths)

    def compile(
        self, *, progress: bool = False, compiler_options: dict[str, Any] | None = None
    ) -> None:
        """Compile every program, several at a time. compiler_options: XLA's."""
        started = perf_counter()
        leaves, state = (_shapes_of(tree) for tree in (self._leaves, self._state))

        def compile_step(key: tuple[int, int]) -> Any:
            packed = jax.ShapeDtypeStruct(new_packed(*key).shape, jnp.int32)
            return self._jitted[key].lower(leaves, state, packed).compile(compiler_options)

        def compile_admission(length: int) -> Any:
            scalar = jax.ShapeDtypeStruct((), jnp.int32)
            tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
            pages = jax.ShapeDtypeStruct((self._sizes.table_width,), jnp.int32)
            one = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.slots.options
            )
            lowered = admit_program().lower(state, scalar, tokens, pages, scalar, scalar, one)
            return lowered.compile(compiler_options)

        with (
            ThreadPoolExecutor(os.cpu_count()) as threads,
            tqdm(total=self.num_programs, desc="Compiling", disable=not progress) as bar,
        ):
            # The largest first, so that they don't end alone.
            keys = sorted(self._jitted, key=lambda key: (-key[1], -key[0]))
            steps = {key: threads.submit(compile_step, key) for key in keys}
            admissions = {
                length: threads.submit(compile_admission, length)
                for length in self._admission_lengths
            }
            for future in [*steps.values(), *admissions.values()]:
                future.add_done_callback(lambda _: bar.update())
            self._programs = {key: future.result() for key, future in steps.items()}
            self._admissions = {length: future.result() for length, future in admissions.items()}
        self.compile_seconds = perf_counter() - started

    def rehearse(self) -> None:
        """Run every step program on padding, twice: the first run loads its kernels, the second
        records its CUDA graph. compile() must have been called."""
        started = perf_counter()
        for rows, chunks in [*self._programs] * 2:
            packed = new_packed(rows, chunks)
            self._state, results = self._programs[rows, chunks](self._leaves, self._state, packed)
            jax.block_until_ready(results)
        self.rehearse_seconds = perf_counter() - started

    def build(self, plan: StepPlan) -> Batch:
        """Lay a step's inputs out. Dispatch it before the scheduler plans another."""
        rows, chunks = self._size_of(plan)
        packed = new_packed(rows, chunks)
        row_fields, chunk_fields = packed_views(packed, rows, chunks)
        page_size = self._sizes.page_size
        sampling: list[tuple[Sequence, int]] = []
        prompts, admitted = [], []
        for row, decode in enumerate(plan.decodes):
            sequence = decode.sequence
            page = sequence.pages[decode.position // page_size]
            row_fields[row] = sequence.slot, decode.position, page
            sampling.append((sequence, row))
        chunk = 0
        for piece in plan.pieces:
            sequence = piece.sequence
            if piece.start == 0:
                admitted.append(sequence)
            if sequence.request.params.prompt_logprobs is not None:
                prompts.append((sequence, piece.start, piece.count, chunk))
            end = piece.start + piece.count
            for start in range(piece.start, end, CHUNK):
                is_last = start + CHUNK >= end
                flags = FIRST * (start == piece.start) | LAST * is_last
                if is_last and piece.samples:
                    flags |= SAMPLES
                    sampling.append((sequence, rows + chunk))
                chunk_fields[chunk] = sequence.slot, start, min(CHUNK, end - start), flags
                chunk += 1
        return Batch((rows, chunks), packed, admitted, sampling, prompts)

    def dispatch(self, batch: Batch) -> Dispatched:
        """Queue a step on the device."""
        for sequence in batch.admitted:
            self._admit(sequence)
        program = self._programs[batch.size]
        self._state, results = program(self._leaves, self._state, batch.packed)
        return Dispatched(batch, results)

    def _admit(self, sequence: Sequence) -> None:
        """Give the sequence's slot its tokens, pages and options."""
        assert sequence.slot is not None, "not admitted by the scheduler"
        tokens = sequence.known_token_ids
        length = next(size for size in self._admission_lengths if size >= len(tokens))
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        pages = np.zeros(self._sizes.table_width, np.int32)
        pages[: len(sequence.pages)] = sequence.pages
        params = sequence.request.params
        wanted = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._state = self._admissions[length](
            self._state,
            np.int32(sequence.slot),
            padded,
            pages,
            np.int32(sequence.prompt_length),
            np.int32(wanted),
            options_of(params, seed=sequence.seed, stop_ids=sequence.stop_ids),
        )

    def collect(self, step: Dispatched) -> Collected:
        """Wait for a step and read what it sampled."""
        tokens = np.asarray(step.results.tokens)
        wanted = [sequence.request.params.logprobs for sequence, _ in step.batch.sampling]
        logprobs = None
        if any(count is not None for count in wanted):
            logprobs = jax.device_get(step.results.logprobs)
        sampled = []
        for (sequence, place), count in zip(step.batch.sampling, wanted, strict=True):
            token_id = int(tokens[place])
            entry = None
            if logprobs is not None and count is not None:
                entry = _entry(logprobs, place, count)
            sampled.append(SampledToken(sequence, None if token_id < 0 else token_id, entry))
        return Collected(sampled, self._collect_prompts(step))

    def _collect_prompts(self, step: Dispatched) -> list[PromptLogprobs]:
        if not step.batch.prompts:
            return []
        logprobs: Logprobs = jax.device_get(step.results.prompt)
        found = []
        for sequence, start, count, chunk in step.batch.prompts:
            prompt = sequence.request.prompt_token_ids
            wanted = sequence.request.params.prompt_logprobs or 0
            # Those at a position are of the token after it; generated ones have their own.
            last = min(start + count, len(prompt) - 1)
            entries = [
                _entry(logprobs, chunk * CHUNK + position - start, wanted)
                for position in range(start, last)
            ]
            found.append(PromptLogprobs(sequence, start + 1, entries))
        return found

    def reset(self) -> None:
        """Empty caches, whatever became of the old ones."""
        self._delete_state()
        self._state = init_engine_state(self._config, self._sizes)

    def close(self) -> None:
        """Give the device memory back; the parameters are the caller's."""
        self._delete_state()
        self._programs, self._admissions, self._jitted, self._leaves = {}, {}, {}, []

    def _delete_state(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()

    def _size_of(self, plan: StepPlan) -> tuple[int, int]:
        if not plan.pieces:
            return self._buckets.rows_for(len(plan.decodes)), 0
        return self._buckets.max_rows, self._buckets.chunks_for(plan.num_chunks)


def _entry(logprobs: Logprobs, place: int, count: int) -> TokenLogprobs:
    ids, values = logprobs.ids[place, :count], logprobs.values[place, :count]
    return TokenLogprobs(
        token=float(logprobs.chosen[place]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )


def _admission_lengths(max_model_len: int) -> Rows[int]:
    """Sizes that a sequence's tokens are padded to on their way to the device."""
    lengths = []
    length = SHORTEST_ADMISSION
    while length < max_model_len:
        lengths.append(length)
        length *= ADMISSION_STEP
    return (*lengths, max_model_len)


def _shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
