"""The jit boundary: which programs there are, what goes in, and what they donate.

    decode   R rows, a token each
    mixed    all rows, and N chunks of prompt
    admit    a sequence's tokens and options, written to its slot before its first chunk

All that lasts from step to step is one EngineState on the device, donated to each program and
given back by it. A step's inputs travel as one int32 array, its results are small. The tokens that
decode rows go on from never leave the device: they stand in the slot's history.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.delta_rule import CHUNK
from qwen35_jax.model.paged import CachePools, PagedKV, StepBatch, init_pools, step_hidden_states
from qwen35_jax.model.transformer import Qwen35, unembed
from qwen35_jax.sampler import prompt_logprobs, sample
from qwen35_jax.sampling_arrays import SamplingArrays, TokenHistory

Array = jax.Array

# A chunk's flags in the packed inputs.
FIRST, LAST, SAMPLES = 1, 2, 4
ROW_FIELDS, CHUNK_FIELDS = 3, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """What the device knows of each slot's sequence.

    history: [slots, L] int32, its tokens so far. tables: [slots, P] int32, its pages in order.
    prompt_lengths: [slots] int32. prompt_logprobs: [slots] int32, how many are wanted, -1 for none.
    options: its sampling options.
    """

    history: Array
    tables: Array
    prompt_lengths: Array
    prompt_logprobs: Array
    options: SamplingArrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    pools: CachePools
    slots: SlotTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """chosen: [M] float32 of the chosen token; ids and values: [M, MAX_LOGPROBS],
    the likeliest."""

    chosen: Array
    ids: Array
    values: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResults:
    """Of a step's R rows and N chunks, M = R + N.

    tokens: [M] int32, -1 where logits were not finite. logprobs: zeros unless a row asked.
    prompt: [N * CHUNK] of each chunk's token after the position; None in a decode program.
    """

    tokens: Array
    logprobs: Logprobs
    prompt: Logprobs | None


@dataclass(frozen=True)
class Sizes:
    """Shapes of the state. num_pages and num_slots count page 0 and slot 0.

    table_width: pages of the longest sequence. max_model_len: tokens of it.
    """

    num_pages: int
    page_size: int
    num_slots: int
    max_model_len: int

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.page_size)


def init_engine_state(config: ModelConfig, sizes: Sizes) -> EngineState:
    """Empty pools, and slots whose options choose greedily."""
    slots = sizes.num_slots
    return EngineState(
        pools=init_pools(
            config,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            num_slots=slots,
        ),
        slots=SlotTable(
            history=jnp.zeros((slots, sizes.max_model_len), jnp.int32),
            tables=jnp.zeros((slots, sizes.table_width), jnp.int32),
            prompt_lengths=jnp.zeros((slots,), jnp.int32),
            prompt_logprobs=jnp.full((slots,), -1, jnp.int32),
            options=SamplingArrays.greedy(slots),
        ),
    )


def packed_size(rows: int, chunks: int) -> int:
    return rows * ROW_FIELDS + chunks * CHUNK_FIELDS


def new_packed(rows: int, chunks: int) -> np.ndarray:
    """All padding: slot 0, no tokens."""
    return np.zeros(packed_size(rows, chunks), np.int32)


def packed_views(packed: Any, rows: int, chunks: int) -> tuple[Any, Any]:
    """A packed array's parts: rows [R, 3] (slot, position, the position's page) and chunks [N, 4]
    (slot, start, length, flags). Of a NumPy array these are views."""
    end = rows * ROW_FIELDS
    return packed[:end].reshape(rows, ROW_FIELDS), packed[end:].reshape(chunks, CHUNK_FIELDS)


def run_step(
    structure: Any,
    rows: int,
    chunks: int,
    vocabulary_size: int,
    leaves: list[Array],
    state: EngineState,
    packed: Array,
) -> tuple[EngineState, StepResults]:
    """The decode and mixed programs. structure and leaves: the parameters, taken apart."""
    params: Qwen35 = jax.tree.unflatten(structure, leaves)
    row_fields, chunk_fields = packed_views(packed, rows, chunks)
    slots = _with_new_pages(state, row_fields)
    flags = chunk_fields[:, 3]
    batch = StepBatch(
        tables=slots.tables,
        row_slots=row_fields[:, 0],
        row_positions=row_fields[:, 1],
        chunk_slots=chunk_fields[:, 0],
        chunk_starts=chunk_fields[:, 1],
        chunk_lengths=chunk_fields[:, 2],
        first=flags & FIRST != 0,
        last=flags & LAST != 0,
    )
    positions = batch.chunk_positions()
    chunk_ids = _tokens_at(slots, batch.chunk_slots[:, None], positions)
    ids = jnp.concatenate(
        [_tokens_at(slots, batch.row_slots, batch.row_positions), chunk_ids.reshape(-1)]
    )
    hidden, pools = step_hidden_states(params, ids, batch, state.pools)

    # The tokens that are sampled: one a row, and one after each chunk that ends a prompt.
    ends = rows + jnp.arange(chunks) * CHUNK + jnp.maximum(batch.chunk_lengths, 1) - 1
    places = jnp.concatenate([jnp.arange(rows), ends])
    samples = flags & SAMPLES != 0
    sampled_slots = jnp.concatenate([batch.row_slots, jnp.where(samples, batch.chunk_slots, 0)])
    lengths = jnp.concatenate([batch.row_positions + 1, batch.chunk_starts + batch.chunk_lengths])
    logits = unembed(params, hidden[places])
    options = jax.tree.map(lambda option: option[sampled_slots], slots.options)
    prompt_lengths = slots.prompt_lengths[sampled_slots]
    sampled = sample(
        logits,
        replace(options, step=lengths - prompt_lengths),
        TokenHistory(slots.history, lengths, prompt_lengths, slots=sampled_slots),
        vocabulary_size=vocabulary_size,
    )
    written = jnp.where(sampled_slots == 0, slots.history.shape[0], sampled_slots)
    history = slots.history.at[written, lengths].set(sampled.tokens, mode="drop")
    results = StepResults(
        tokens=jnp.where(sampled.finite, sampled.tokens, -1),
        logprobs=Logprobs(sampled.token_logprobs, sampled.top_ids, sampled.top_logprobs),
        prompt=_prompt_logprobs(params, hidden[rows:], batch, slots, vocabulary_size)
        if chunks
        else None,
    )
    return EngineState(pools, replace(slots, history=history)), results


def _with_new_pages(state: EngineState, row_fields: Array) -> SlotTable:
    """The slots, once rows whose position begins a page have it in their tables."""
    page_size = next(pool for pool in state.pools.layers if isinstance(pool, PagedKV)).page_size
    slot, position, page = row_fields.T
    slots = state.slots
    return replace(slots, tables=slots.tables.at[slot, position // page_size].set(page))


def _tokens_at(slots: SlotTable, at: Array, positions: Array) -> Array:
    return slots.history.at[at, positions].get(mode="clip")


def _prompt_logprobs(
    params: Qwen35, hidden: Array, batch: StepBatch, slots: SlotTable, vocabulary_size: int
) -> Logprobs:
    """hidden: [N * CHUNK, D]. Zeros where no chunk's sequence asked for them."""
    next_ids = _tokens_at(slots, batch.chunk_slots[:, None], batch.chunk_positions() + 1)
    count = next_ids.size

    def compute() -> Logprobs:
        def one_chunk(chunk: tuple[Array, Array]) -> Logprobs:
            hidden, ids = chunk
            return Logprobs(
                *prompt_logprobs(unembed(params, hidden), ids, vocabulary_size=vocabulary_size)
            )

        found = jax.lax.map(one_chunk, (hidden.reshape(batch.chunks, CHUNK, -1), next_ids))
        return jax.tree.map(lambda value: value.reshape(count, *value.shape[2:]), found)

    shapes = jax.eval_shape(compute)
    wanted = jnp.any(slots.prompt_logprobs[batch.chunk_slots] >= 0)
    return jax.lax.cond(
        wanted,
        compute,
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
    )


def admit(
    state: EngineState,
    slot: Array,
    tokens: Array,
    pages: Array,
    prompt_length: Array,
    prompt_logprobs: Array,
    options: SamplingArrays,
) -> EngineState:
    """Write a sequence to its slot. tokens: [L'] int32, at most the history's width; pages: [P]
    int32; options: one row's, without the leading axis."""
    slots = state.slots
    table = SlotTable(
        history=jax.lax.dynamic_update_slice(slots.history, tokens[None], (slot, 0)),
        tables=slots.tables.at[slot].set(pages),
        prompt_lengths=slots.prompt_lengths.at[slot].set(prompt_length),
        prompt_logprobs=slots.prompt_logprobs.at[slot].set(prompt_logprobs),
        options=jax.tree.map(lambda all, one: all.at[slot].set(one), slots.options, options),
    )
    return EngineState(state.pools, table)


def step_program(params: Qwen35, rows: int, chunks: int, vocabulary_size: int) -> Any:
    """The jitted step of these sizes; its arguments are (leaves, state, packed)."""
    structure = jax.tree.structure(params)
    return jax.jit(partial(run_step, structure, rows, chunks, vocabulary_size), donate_argnums=(1,))


def admit_program() -> Any:
    return jax.jit(admit, donate_argnums=(0,))
