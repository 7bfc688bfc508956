"""The memory plan: sequences first, then KV; what is asked for and does not fit is said."""

import re
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.config import ModelConfig
from qwen35_jax.engine.memory_plan import MemoryPlan, plan_memory, workspace_bytes
from qwen35_jax.errors import ConfigError
from qwen35_jax.model.transformer import Qwen35, parameter_bytes
from qwen35_jax.step import init_engine_state
from tests.support.models import tiny_config
from tests.support.published_configs import published_config

CONFIG = ModelConfig.from_dict(published_config("4B"))
WEIGHTS = parameter_bytes(Qwen35(CONFIG))
GIGABYTE = 10**9
# What JAX has at 0.9 of a card of 32 GB.
SMALL = 30 * GIGABYTE


def plan(budget_bytes: int | None, *, config: ModelConfig = CONFIG, **changes: Any) -> MemoryPlan:
    asked: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_model_len": 32768,
        "max_num_batched_tokens": 2048,
        "page_size": 64,
    }
    return plan_memory(config, weight_bytes=WEIGHTS, budget_bytes=budget_bytes, **asked | changes)


def one_more_slot(plan: MemoryPlan) -> int:
    return plan.state_bytes // plan.sizes.num_slots


def one_more_page(plan: MemoryPlan) -> int:
    return plan.kv_bytes // plan.sizes.num_pages


def test_planned_state_is_what_the_arrays_take():
    config = tiny_config("ratio2_tied", dtype="bfloat16")
    planned = plan_memory(
        config,
        weight_bytes=1000,
        budget_bytes=None,
        max_num_seqs=3,
        max_model_len=100,
        max_num_batched_tokens=64,
        page_size=16,
    )
    assert (planned.sizes.num_slots, planned.max_num_seqs) == (4, 3)
    arrays = jax.tree.leaves(init_engine_state(config, planned.sizes))
    assert planned.state_bytes + planned.kv_bytes == sum(array.nbytes for array in arrays)


def test_a_sequence_of_the_4b_model_has_49_mib_of_state_and_32_kib_of_kv_a_token():
    planned = plan(None)
    history = 4 * 32768
    assert one_more_slot(planned) - history == pytest.approx(49.1 * 2**20, rel=0.01)
    assert one_more_page(planned) == 64 * 32 * 1024


def test_everything_left_is_kv_up_to_the_last_page():
    planned = plan(SMALL, max_num_seqs=64)
    assert planned.max_num_seqs == 64 and planned.warnings == ()
    assert planned.free_bytes is not None
    assert 0 <= planned.free_bytes < one_more_page(planned)


def test_kv_stops_where_no_sequence_could_fill_more():
    planned = plan(SMALL, max_num_seqs=2, max_model_len=1000)
    assert planned.sizes.num_pages == 2 * 16 + 1
    assert planned.kv_tokens == 2048
    assert planned.free_bytes is not None and planned.free_bytes > 15 * GIGABYTE


def test_too_many_sequences_start_with_what_fits_and_it_is_said():
    planned = plan(SMALL, max_num_seqs=1024)
    assert 100 < planned.max_num_seqs < 400
    assert planned.sizes.num_slots == planned.max_num_seqs + 1
    (warning,) = planned.warnings
    assert f"max_num_seqs 1024 does not fit: {planned.max_num_seqs} sequences" in warning
    # Each that runs has some KV, and one more of both would not have fitted.
    assert planned.kv_tokens >= 1024 * planned.max_num_seqs
    assert planned.free_bytes is not None
    spare = planned.free_bytes + (planned.kv_tokens - 1024 * planned.max_num_seqs) * 32 * 1024
    assert spare < one_more_slot(planned) + 1024 * 32 * 1024 + 10 * 2**20


def test_sequences_give_way_to_one_of_the_longest():
    planned = plan(SMALL, max_num_seqs=1024, max_model_len=262144)
    assert planned.kv_tokens >= 262144
    assert planned.max_num_seqs > 100


@settings(max_examples=40)
@given(
    budget=st.integers(9 * GIGABYTE, 40 * GIGABYTE),
    sequences=st.integers(1, 2000),
    length=st.integers(2, 262144),
    page_size=st.sampled_from([16, 64, 256]),
    kv_tokens=st.none() | st.integers(1, 2_000_000),
)
def test_a_plan_fits_and_holds_one_longest_sequence_or_is_refused(
    budget: int, sequences: int, length: int, page_size: int, kv_tokens: int | None
):
    # Four layers of the 32: their shapes are found faster.
    config = CONFIG.replace(layer_types=CONFIG.layer_types[:4])
    try:
        planned = plan(
            budget,
            config=config,
            max_num_seqs=sequences,
            max_model_len=length,
            page_size=page_size,
            kv_cache_tokens=kv_tokens,
        )
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert planned.used_bytes <= budget
    assert 1 <= planned.max_num_seqs <= sequences
    assert planned.sizes.num_pages - 1 >= planned.sizes.table_width
    assert (planned.max_num_seqs < sequences) == bool(planned.warnings)
    if kv_tokens is not None:
        assert kv_tokens <= planned.kv_tokens < kv_tokens + page_size


def test_a_context_that_does_not_fit_says_which_one_does():
    with pytest.raises(ConfigError) as caught:
        plan(12 * GIGABYTE, max_model_len=262144)
    message = str(caught.value)
    assert message.startswith("max_model_len 262144 does not fit: one sequence of 262144 tokens")
    assert "of 12.00 GB" in message and "--gpu-memory-utilization" in message
    (fitting,) = re.findall(r"--max-model-len (\d+) fits", message)
    assert plan(12 * GIGABYTE, max_model_len=int(fitting)).max_num_seqs >= 1
    with pytest.raises(ConfigError):
        plan(12 * GIGABYTE, max_model_len=int(fitting) + 64)


def test_no_room_beside_the_weights_names_no_context():
    for budget in (9 * GIGABYTE, GIGABYTE, -GIGABYTE):
        with pytest.raises(ConfigError, match="leaves no room for a sequence") as caught:
            plan(budget)
        assert "weights 8.41 GB" in str(caught.value) and "-" not in str(caught.value).split(";")[0]


def test_a_stated_kv_cache_is_what_there_is():
    for budget in (None, SMALL):
        planned = plan(budget, kv_cache_tokens=100_000)
        assert planned.sizes.num_pages == 1563 + 1
        assert planned.max_num_seqs == 16


def test_a_stated_kv_cache_leaves_fewer_sequences():
    planned = plan(SMALL, kv_cache_tokens=500_000, max_num_seqs=256)
    assert 16 < planned.max_num_seqs < 100
    assert planned.warnings


def test_a_stated_kv_cache_below_the_context_is_refused_with_both_ways_out():
    for budget in (None, SMALL):
        with pytest.raises(ConfigError) as caught:
            plan(budget, kv_cache_tokens=10_000)
        assert "--kv-cache-tokens 32768" in str(caught.value)
        assert "--max-model-len 10000" in str(caught.value)


def test_a_stated_kv_cache_over_the_budget_says_what_fits():
    with pytest.raises(ConfigError, match="kv_cache_tokens 10000000 does not fit") as caught:
        plan(SMALL, kv_cache_tokens=10_000_000)
    (fitting,) = re.findall(r"--kv-cache-tokens (\d+) fits", str(caught.value))
    assert plan(SMALL, kv_cache_tokens=int(fitting)).max_num_seqs == 1


def test_a_stated_kv_cache_and_a_context_over_the_budget_say_what_fits_together():
    with pytest.raises(ConfigError) as caught:
        plan(12 * GIGABYTE, max_model_len=262144, kv_cache_tokens=300_000)
    ((length, tokens),) = re.findall(
        r"--max-model-len (\d+) with --kv-cache-tokens (\d+) fits", str(caught.value)
    )
    plan(12 * GIGABYTE, max_model_len=int(length), kv_cache_tokens=int(tokens))


@pytest.mark.parametrize(
    ("sequences", "length", "tokens"),
    [(16, 8192, 32768), (2, 8192, 16384), (16, 131072, 131072), (1, 100, 128)],
)
def test_without_a_limit_kv_is_for_a_batch_of_usual_requests(
    sequences: int, length: int, tokens: int
):
    planned = plan(None, max_num_seqs=sequences, max_model_len=length)
    assert planned.kv_tokens == tokens
    assert planned.max_num_seqs == sequences
    assert planned.budget_bytes is None and planned.free_bytes is None


def test_table_shows_the_parts_and_they_sum_to_the_budget():
    planned = plan(SMALL)
    lines = planned.table().splitlines()
    assert lines[0] == "Memory plan"
    counts = {line.split("  ")[1]: line.split()[-2:] for line in lines[1:-1]}
    assert list(counts) == ["weights", "state slots", "KV pages", "workspace", "free", "total"]
    sizes = {
        name: float(number) * {"GB": 1e9, "MB": 1e6}[unit]
        for name, (number, unit) in counts.items()
    }
    assert sizes.pop("total") == SMALL
    assert sum(sizes.values()) == pytest.approx(SMALL, rel=1e-3)
    assert len({len(line) for line in lines[1:-1]}) == 1, "the numbers are not right-aligned"
    assert "16 and 1 for padding" in lines[2]
    assert lines[-1] == (
        "16 sequences at once, each of up to 32,768 tokens; KV for 524,288 tokens, which is 16.0 "
        "of that length"
    )


def test_table_without_a_limit_has_nothing_free_and_totals_what_is_used():
    planned = plan(None)
    lines = planned.table().splitlines()
    assert lines[0] == "Memory plan (the device states no limit)"
    assert not any(line.startswith("  free") for line in lines)
    assert lines[-2].endswith(f"{planned.used_bytes / 1e9:.2f} GB")


def test_workspace_grows_with_rows_context_and_step():
    sizes = {"rows": 16, "max_model_len": 262144, "max_num_batched_tokens": 2048}
    base = workspace_bytes(CONFIG, **sizes)
    assert 10**9 < base < 8 * GIGABYTE
    assert workspace_bytes(CONFIG, **sizes | {"rows": 1024}) > base
    assert workspace_bytes(CONFIG, **sizes | {"max_model_len": 2**20}) > base
    assert workspace_bytes(CONFIG, **sizes | {"max_num_batched_tokens": 2**16}) > base
