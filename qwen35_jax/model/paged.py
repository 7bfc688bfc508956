"""One step of many sequences: decode rows and prompt chunks over paged KV and state slots.

The step's T tokens stand flat: R decode rows of one token each, then N chunks of CHUNK tokens. A
chunk holds tokens of one sequence; only the last chunk of a piece of prompt may be partly filled.
The dense layers run once over all T; attention and the delta rule split rows from chunks.

    CachePools
      layers     one entry a layer, in order
        PagedKV      keys, values     [pages, page size, G, K] model dtype
        StateSlots   recurrent        [slots, H, K, V] float32
                     window           [slots, W - 1, C] model dtype

Page 0 and slot 0 belong to nobody. Nothing is read that the sequence itself has not written:
positions beyond its own are masked, and a sequence's first chunk starts from zeros.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from qwen35_jax.config import ModelConfig
from qwen35_jax.model.attention import GatedAttention, attend
from qwen35_jax.model.decoder_layer import DecoderLayer, add
from qwen35_jax.model.delta_net import GatedDeltaNet, causal_conv
from qwen35_jax.model.delta_rule import CHUNK, ragged_delta_rule, recurrent_delta_rule
from qwen35_jax.model.layers import Array, rms_norm, rope_tables, value_of
from qwen35_jax.model.transformer import Qwen35

# Attention reads as many pages as the longest context needs, out of these powers of the block
# table's width: a program holds a branch for each.
CONTEXT_STEP = 4
SHORTEST_CONTEXT = 4
# Cached tokens gathered at once over all rows; beyond it rows go one by one, to bound the copy.
TOKENS_AT_ONCE = 2**17


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKV:
    """Keys (normed and turned by RoPE) and values of one layer: [pages, page size, G, K]."""

    keys: Array
    values: Array

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSlots:
    """One delta layer: recurrent [slots, H, K, V] float32, window [slots, W - 1, C]."""

    recurrent: Array
    window: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachePools:
    """All layers' pools. See the module docstring for shapes."""

    layers: tuple[PagedKV | StateSlots, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """What a step runs. All are int32 but `first` and `last`.

    tables: [slots, P], the pages of each slot's sequence in order.
    row_slots, row_positions: [R], a row's state slot (0 for padding) and its token's position.
    chunk_slots, chunk_starts, chunk_lengths: [N], slot, first position and number of tokens.
    first, last: [N] bool, whether a piece of prompt starts and ends there.
    """

    tables: Array
    row_slots: Array
    row_positions: Array
    chunk_slots: Array
    chunk_starts: Array
    chunk_lengths: Array
    first: Array
    last: Array

    @property
    def rows(self) -> int:
        return self.row_slots.shape[0]

    @property
    def chunks(self) -> int:
        return self.chunk_slots.shape[0]

    def chunk_positions(self) -> Array:
        """[N, CHUNK], of the padding too."""
        return self.chunk_starts[:, None] + jnp.arange(CHUNK)

    def chunk_valid(self) -> Array:
        """[N, CHUNK] bool."""
        return jnp.arange(CHUNK) < self.chunk_lengths[:, None]


def init_pools(
    config: ModelConfig, *, num_pages: int, page_size: int, num_slots: int
) -> CachePools:
    """Zeros; num_pages and num_slots count the reserved ones."""
    dtype = jnp.dtype(config.dtype)
    kv = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
    recurrent = (
        num_slots,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    window = (num_slots, config.linear_conv_kernel_dim - 1, config.linear_conv_dim)

    def layer(layer_type: str) -> PagedKV | StateSlots:
        if layer_type == "full_attention":
            return PagedKV(jnp.zeros(kv, dtype), jnp.zeros(kv, dtype))
        return StateSlots(jnp.zeros(recurrent, jnp.float32), jnp.zeros(window, dtype))

    return CachePools(tuple(layer(layer_type) for layer_type in config.layer_types))


def step_hidden_states(
    params: Qwen35, ids: Array, batch: StepBatch, pools: CachePools
) -> tuple[Array, CachePools]:
    """ids: [T] int32 -> the final norm's output [T, D], and the pools with the tokens in them."""
    config = params.config
    positions = jnp.concatenate([batch.row_positions, batch.chunk_positions().reshape(-1)])
    cos, sin = rope_tables(positions[None], config)
    rope = (cos[0], sin[0])
    x = jnp.take(value_of(params.embed), ids, axis=0)
    new_layers = []
    for layer, pool in zip(params.layers, pools.layers, strict=True):
        x, pool = _layer(layer, x, pool, batch, rope)
        new_layers.append(pool)
    hidden = rms_norm(x, value_of(params.norm), config.rms_norm_eps)
    return hidden, CachePools(tuple(new_layers))


def _layer(
    layer: DecoderLayer,
    x: Array,
    pool: PagedKV | StateSlots,
    batch: StepBatch,
    rope: tuple[Array, Array],
) -> tuple[Array, PagedKV | StateSlots]:
    epsilon = layer.config.rms_norm_eps
    h = rms_norm(x, value_of(layer.input_norm), epsilon)
    if isinstance(layer.mixer, GatedAttention):
        assert isinstance(pool, PagedKV)
        h, pool = paged_attention(layer.mixer, h, pool, batch, rope)
    else:
        assert isinstance(pool, StateSlots)
        h, pool = slot_delta_net(layer.mixer, h, pool, batch)
    x = add(x, h)
    return add(x, layer.mlp(rms_norm(x, value_of(layer.mlp_norm), epsilon))), pool


def paged_attention(
    mixer: GatedAttention, x: Array, pool: PagedKV, batch: StepBatch, rope: tuple[Array, Array]
) -> tuple[Array, PagedKV]:
    """x: [T, D] -> [T, D], and the pool with the new tokens' keys and values."""
    q, k, v, gate = mixer.project(x, rope)
    pool = _write_kv(pool, k, v, batch)
    rows = batch.rows
    groups = pool.keys.shape[2]
    grouped = q.reshape(q.shape[0], groups, -1, q.shape[-1])
    parts = []
    if rows:
        positions = jnp.where(batch.row_slots == 0, -1, batch.row_positions)[:, None]
        queries = grouped[:rows, None]
        attended = _attend_pages(
            queries, pool, batch.tables, batch.row_slots, positions, mixer.config
        )
        parts.append(attended[:, 0])
    if batch.chunks:
        positions = jnp.where(batch.chunk_valid(), batch.chunk_positions(), -1)
        queries = grouped[rows:].reshape(batch.chunks, CHUNK, *grouped.shape[1:])
        attended = _attend_pages(
            queries, pool, batch.tables, batch.chunk_slots, positions, mixer.config
        )
        parts.append(attended.reshape(-1, *attended.shape[2:]))
    return mixer.finish(jnp.concatenate(parts).reshape(q.shape), gate), pool


def _write_kv(pool: PagedKV, keys: Array, values: Array, batch: StepBatch) -> PagedKV:
    """keys, values: [T, G, K]. Padding is dropped."""
    num_pages, page_size = pool.keys.shape[:2]
    chunk_positions = batch.chunk_positions()
    row_pages = batch.tables[batch.row_slots, batch.row_positions // page_size]
    chunk_pages = batch.tables[batch.chunk_slots[:, None], chunk_positions // page_size]
    pages = jnp.concatenate(
        [
            jnp.where(batch.row_slots == 0, num_pages, row_pages),
            jnp.where(batch.chunk_valid(), chunk_pages, num_pages).reshape(-1),
        ]
    )
    positions = jnp.concatenate([batch.row_positions, chunk_positions.reshape(-1)])
    offsets = positions % page_size
    return PagedKV(
        keys=pool.keys.at[pages, offsets].set(keys, mode="drop"),
        values=pool.values.at[pages, offsets].set(values, mode="drop"),
    )


def _attend_pages(
    queries: Array,
    pool: PagedKV,
    tables: Array,
    slots: Array,
    positions: Array,
    config: ModelConfig,
) -> Array:
    """queries: [B, T, G, H / G, K] at positions [B, T] (-1 for padding), tables: [slots, P],
    slots: [B] -> [B, T, G, H / G, K] float32, zeros for padding."""
    page_size, widths = pool.keys.shape[1], context_widths(tables.shape[1])
    last = jnp.max(positions, axis=1)

    def attend_width(width: int) -> Array:
        def some_rows(rows: tuple[Array, ...]) -> Array:
            queries, slots, positions, last = rows
            pages = tables[slots, :width]

            def gather(array: Array) -> Array:
                gathered = array[pages].reshape(len(pages), -1, *array.shape[2:])
                # Beyond its own tokens a sequence's pages hold anything, and 0 times NaN is NaN.
                own = jnp.arange(width * page_size) <= last[:, None]
                return jnp.where(own[..., None, None], gathered, 0)

            keys, values = gather(pool.keys), gather(pool.values)
            return attend(queries, keys, values, jnp.maximum(positions, 0), config)

        batch, length = positions.shape
        rows = (queries, slots, positions, last)
        if batch * width * page_size * -(-length // 8) <= TOKENS_AT_ONCE:
            return some_rows(rows)
        one_by_one = jax.tree.map(lambda value: value[:, None], rows)
        return jax.lax.map(some_rows, one_by_one)[:, 0]

    needed = jnp.max(last) // page_size + 1
    branch = jnp.sum(needed > jnp.asarray(widths[:-1], jnp.int32))
    branches = [lambda width=width: attend_width(width) for width in widths]
    attended = jax.lax.switch(branch, branches) if len(widths) > 1 else branches[0]()
    return jnp.where((positions >= 0)[..., None, None, None], attended, 0.0)


def context_widths(table_width: int) -> list[int]:
    """The numbers of pages for which attention has a branch, the last the whole table."""
    widths = []
    width = SHORTEST_CONTEXT
    while width < table_width:
        widths.append(width)
        width *= CONTEXT_STEP
    return [*widths, table_width]


def slot_delta_net(
    mixer: GatedDeltaNet, x: Array, pool: StateSlots, batch: StepBatch
) -> tuple[Array, StateSlots]:
    """x: [T, D] -> [T, D], and the pool with the states after the new tokens."""
    qkv, z, b, a = mixer.project(x)
    rows = batch.rows
    parts = []
    if rows:
        out, pool = _decode_rows(mixer, qkv[:rows], b[:rows], a[:rows], pool, batch)
        parts.append(out)
    if batch.chunks:
        out, pool = _prompt_chunks(mixer, qkv[rows:], b[rows:], a[rows:], pool, batch)
        parts.append(out)
    return mixer.finish(jnp.concatenate(parts), z), pool


def _decode_rows(
    mixer: GatedDeltaNet, qkv: Array, b: Array, a: Array, pool: StateSlots, batch: StepBatch
) -> tuple[Array, StateSlots]:
    slots = batch.row_slots
    used = (slots != 0)[:, None]
    mixed, window = causal_conv(
        qkv[:, None], pool.window[slots], value_of(mixer.conv), None, mixer.config
    )
    inputs = mixer.rule_inputs(mixed, b[:, None], a[:, None], used)
    out, recurrent = recurrent_delta_rule(*inputs, pool.recurrent[slots])
    return out[:, 0], _write_slots(pool, jnp.where(slots != 0, slots, -1), recurrent, window)


def _prompt_chunks(
    mixer: GatedDeltaNet, qkv: Array, b: Array, a: Array, pool: StateSlots, batch: StepBatch
) -> tuple[Array, StateSlots]:
    chunks, slots = batch.chunks, batch.chunk_slots
    qkv, b, a = (value.reshape(chunks, CHUNK, -1) for value in (qkv, b, a))
    # A sequence's first chunk starts from zeros, whatever its slot holds.
    fresh = batch.chunk_starts == 0
    stored = jnp.where(fresh[:, None, None], 0, pool.window[slots])
    # A chunk that isn't the first of its piece follows a full one.
    width = stored.shape[1]
    before = jnp.concatenate([jnp.zeros_like(stored[:1]), qkv[:-1, CHUNK - width :]])
    before = jnp.where(batch.first[:, None, None], stored, before)
    mixed, window = causal_conv(
        qkv, before, value_of(mixer.conv), batch.chunk_lengths, mixer.config
    )
    inputs = mixer.rule_inputs(mixed, b, a, batch.chunk_valid())
    initial = jnp.where(fresh[:, None, None, None], 0.0, pool.recurrent[slots])
    out, states = ragged_delta_rule(*inputs, initial, batch.first)
    ends = jnp.where(batch.last & (slots != 0), slots, -1)
    return out.reshape(-1, *out.shape[2:]), _write_slots(pool, ends, states, window)


def _write_slots(pool: StateSlots, slots: Array, recurrent: Array, window: Array) -> StateSlots:
    """slots: [B], -1 for what is dropped."""
    slots = jnp.where(slots < 0, pool.recurrent.shape[0], slots)
    return StateSlots(
        recurrent=pool.recurrent.at[slots].set(recurrent, mode="drop"),
        window=pool.window.at[slots].set(window, mode="drop"),
    )
