"""What the device's memory is used for: weights, state slots, KV pages, workspace.

A sequence needs a state slot to run at all, and KV for its tokens. So sequences come first, and
then everything left is KV.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from qwen35_jax.checkpoint import human_bytes
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.model.delta_rule import CHUNK
from qwen35_jax.model.paged import TOKENS_AT_ONCE
from qwen35_jax.step import Sizes, init_engine_state

# Where fewer sequences fit than are asked for, each is counted with KV for so many tokens: a slot
# whose sequence finds no pages only waits.
TOKENS_BESIDE_A_SLOT = 1024
# KV where the device states no limit: enough for a batch of usual requests.
DEFAULT_KV_TOKENS = 32768
# For gaps between arrays.
SLACK_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """sizes: of the state, page 0 and slot 0 included. max_num_seqs: sequences that run at once.

    budget_bytes: what all must fit in; None where the device states no limit. warnings: lines about
    what was asked for and is not had.
    """

    sizes: Sizes
    max_num_seqs: int
    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        return (self.sizes.num_pages - 1) * self.sizes.page_size

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def free_bytes(self) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes

    def table(self) -> str:
        """The plan for people, in lines."""
        sizes = self.sizes
        rows = [
            ("weights", "", self.weight_bytes),
            ("state slots", f"{self.max_num_seqs:,} and 1 for padding", self.state_bytes),
            (
                "KV pages",
                f"{sizes.num_pages - 1:,} of {sizes.page_size} tokens, and 1 for padding",
                self.kv_bytes,
            ),
            ("workspace", "estimated", self.workspace_bytes),
        ]
        if self.free_bytes is not None:
            rows.append(("free", "", self.free_bytes))
        rows.append(("total", "", self.budget_bytes or self.used_bytes))
        cells = [(name, detail, human_bytes(count)) for name, detail, count in rows]
        names, details, counts = (max(map(len, column)) for column in zip(*cells, strict=True))
        title = "Memory plan" if self.budget_bytes else "Memory plan (the device states no limit)"
        return "\n".join(
            [
                title,
                *(
                    f"  {name:<{names}}  {detail:<{details}}  {count:>{counts}}"
                    for name, detail, count in cells
                ),
                f"{self.max_num_seqs:,} sequences at once, each of up to {sizes.max_model_len:,} "
                f"tokens; KV for {self.kv_tokens:,} tokens, which is "
                f"{self.kv_tokens / sizes.max_model_len:.1f} of that length",
            ]
        )


def plan_memory(
    config: ModelConfig,
    *,
    weight_bytes: int,
    budget_bytes: int | None,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    page_size: int,
    kv_cache_tokens: int | None = None,
) -> MemoryPlan:
    """Decide the sizes of the engine's state.

    budget_bytes: for all of it, the weights too; None for no limit. kv_cache_tokens: the KV cache's
    room where it is stated. Fewer sequences than max_num_seqs are a warning in the plan.

    Raises ConfigError, saying what would fit, where not even one sequence of max_model_len does.
    """
    asked = _Asked(
        config=config,
        weight_bytes=weight_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size,
        kv_cache_tokens=kv_cache_tokens,
    )
    if kv_cache_tokens is not None and asked.pages_of(kv_cache_tokens) < asked.longest_pages:
        raise ConfigError(
            f"kv_cache_tokens ({kv_cache_tokens}) holds no sequence of max_model_len "
            f"({max_model_len}) tokens: raise it (--kv-cache-tokens {max_model_len}) or lower the "
            f"context (--max-model-len {kv_cache_tokens})"
        )
    if budget_bytes is None:
        tokens = kv_cache_tokens or max(
            max_model_len, min(max_num_seqs * max_model_len, DEFAULT_KV_TOKENS)
        )
        return asked.plan(max_num_seqs, asked.pages_of(tokens))

    sequences = _largest(max_num_seqs, lambda count: asked.least_bytes(count) <= budget_bytes)
    if sequences == 0:
        raise _nothing_fits(asked, budget_bytes)
    pages = asked.least_pages(sequences)
    if kv_cache_tokens is None:
        left = budget_bytes - asked.least_bytes(sequences)
        # More pages than all sequences can fill would never be touched.
        pages = min(pages + left // asked.cost.page_bytes, sequences * asked.longest_pages)
    plan = asked.plan(sequences, pages, budget_bytes)
    if sequences == max_num_seqs:
        return plan
    return replace(
        plan,
        warnings=(
            f"max_num_seqs {max_num_seqs} does not fit: {sequences} sequences run at once, each "
            f"with {human_bytes(asked.cost.slot_bytes)} of state, beside {plan.kv_tokens:,} tokens "
            f"of KV in {human_bytes(plan.kv_bytes)}",
        ),
    )


def workspace_bytes(
    config: ModelConfig, *, rows: int, max_model_len: int, max_num_batched_tokens: int
) -> int:
    """An estimate of what the largest step holds beside weights and caches, in bytes.

    The largest of what a step needs at one time or another, and what compiling it needs:

        sampling   eight arrays [M, V] float32 of the M sampled tokens (logits, scaled, noise, a
                   sort and its results) and their histories; or four of a chunk of prompt
        MLP        gate, up and their product [T, 3 I], and three times the residual stream
        delta rule per chunk its inputs and products in float32, twice, and two states
        attention  the keys and values gathered, and a chunk's scores, twice
        compiling  a copy of the largest matrix, which is timed with other tilings
    """
    itemsize = jnp.dtype(config.dtype).itemsize
    chunks = -(-max_num_batched_tokens // CHUNK)
    tokens = rows + chunks * CHUNK
    sampled = rows + chunks
    length = max_model_len

    sampling = 4 * config.vocab_size * max(8 * sampled, 4 * CHUNK) + 4 * sampled * length
    mlp = tokens * itemsize * (3 * config.intermediate_size + 3 * config.hidden_size)
    heads = config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    delta_inputs = CHUNK * heads * (4 * key + 2 * value + 3 * CHUNK)
    delta_rule = 4 * (2 * chunks * delta_inputs + 2 * (chunks + rows) * heads * key * value)
    gathered = max(length, min(TOKENS_AT_ONCE, rows * length))
    kv = gathered * 2 * config.num_key_value_heads * config.head_dim * itemsize
    scored = max(length, min(TOKENS_AT_ONCE // 8, chunks * length))
    scores = scored * CHUNK * config.num_attention_heads * 4
    compiling = config.vocab_size * config.hidden_size * itemsize
    return max(sampling, mlp, delta_rule, kv + 2 * scores, compiling) + SLACK_BYTES


@dataclass(frozen=True)
class _Cost:
    """Bytes of one slot, of one page, and of what is there whatever their numbers."""

    slot_bytes: int
    page_bytes: int
    fixed_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the plan is for: everything but the budget and the number of sequences."""

    config: ModelConfig
    weight_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int
    kv_cache_tokens: int | None

    @cached_property
    def cost(self) -> _Cost:
        one = _state_bytes(self._sizes(1, 1), self.config)
        slot = _state_bytes(self._sizes(2, 1), self.config) - one
        page = _state_bytes(self._sizes(1, 2), self.config) - one
        return _Cost(slot, page, one - slot - page)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def longest_pages(self) -> int:
        return self.pages_of(self.max_model_len)

    def least_pages(self, sequences: int) -> int:
        """What so many sequences are not worth having without."""
        if self.kv_cache_tokens is not None:
            return self.pages_of(self.kv_cache_tokens)
        usual = self.pages_of(min(self.max_model_len, TOKENS_BESIDE_A_SLOT))
        return max(self.longest_pages, sequences * usual)

    def least_bytes(self, sequences: int) -> int:
        return self.plan(sequences, self.least_pages(sequences)).used_bytes

    def plan(self, sequences: int, pages: int, budget_bytes: int | None = None) -> MemoryPlan:
        """Of so many sequences and pages, those for padding not counted."""
        cost = self.cost
        return MemoryPlan(
            sizes=self._sizes(sequences + 1, pages + 1),
            max_num_seqs=sequences,
            weight_bytes=self.weight_bytes,
            state_bytes=cost.fixed_bytes + (sequences + 1) * cost.slot_bytes,
            kv_bytes=(pages + 1) * cost.page_bytes,
            workspace_bytes=workspace_bytes(
                self.config,
                rows=sequences,
                max_model_len=self.max_model_len,
                max_num_batched_tokens=self.max_num_batched_tokens,
            ),
            budget_bytes=budget_bytes,
        )

    def _sizes(self, slots: int, pages: int) -> Sizes:
        return Sizes(
            num_pages=pages,
            page_size=self.page_size,
            num_slots=slots,
            max_model_len=self.max_model_len,
        )


def _state_bytes(sizes: Sizes, config: ModelConfig) -> int:
    state = jax.eval_shape(lambda: init_engine_state(config, sizes))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _nothing_fits(asked: _Asked, budget_bytes: int) -> ConfigError:
    """Not even one sequence: the error that says what would."""

    def shortage(asked: _Asked) -> str:
        least = asked.plan(1, asked.least_pages(1))
        return (
            f"one sequence of {asked.max_model_len} tokens takes {human_bytes(least.used_bytes)} "
            f"(weights {human_bytes(least.weight_bytes)}, state {human_bytes(least.state_bytes)}, "
            f"KV {human_bytes(least.kv_bytes)}, workspace {human_bytes(least.workspace_bytes)}) "
            f"of {human_bytes(max(0, budget_bytes))}"
        )

    if asked.kv_cache_tokens is not None:
        pages = _largest(
            asked.least_pages(1), lambda count: asked.plan(1, count).used_bytes <= budget_bytes
        )
        if pages >= asked.longest_pages:
            fitting = pages * asked.page_size
            return ConfigError(
                f"kv_cache_tokens {asked.kv_cache_tokens} does not fit: {shortage(asked)}; "
                f"--kv-cache-tokens {fitting} fits"
            )

    def shorter(pages: int) -> _Asked:
        return replace(asked, max_model_len=pages * asked.page_size, kv_cache_tokens=None)

    fitting = asked.page_size * _largest(
        asked.longest_pages - 1, lambda pages: shorter(pages).least_bytes(1) <= budget_bytes
    )
    if fitting == 0:
        return ConfigError(
            f"the model leaves no room for a sequence: even {shortage(shorter(1))}; raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens, or end other users of the "
            "device"
        )
    room = f"--max-model-len {fitting}"
    if asked.kv_cache_tokens is not None:
        room += f" with --kv-cache-tokens {fitting}"
    return ConfigError(
        f"max_model_len {asked.max_model_len} does not fit: {shortage(asked)}; {room} fits, or "
        "raise --gpu-memory-utilization"
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, where all below one that fits do; else 0."""
    if most >= 1 and fits(most):
        return most
    low, high = 0, max(most, 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
