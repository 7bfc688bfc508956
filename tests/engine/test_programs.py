"""The compiled programs: what they hold and alias, and that no others come after the start."""

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.compile_cache import CompileCounter
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.step import new_packed, step_program
from tests.support.engines import ids_of, two_layer_params
from tests.support.small_engine import VOCABULARY, make_engine, random_request, run

MEBIBYTE = 2**20


def program_and_arguments(engine: ContinuousBatchingEngine, rows: int, chunks: int) -> Any:
    params = two_layer_params()
    state = engine.runner._state
    lowered = step_program(params, rows, chunks, VOCABULARY).lower(
        jax.tree.leaves(params), state, new_packed(rows, chunks)
    )
    return lowered, state


@pytest.fixture(scope="module")
def engine() -> ContinuousBatchingEngine:
    return make_engine(two_layer_params())


@pytest.mark.parametrize(("rows", "chunks"), [(7, 0), (7, 4)], ids=["decode", "mixed"])
def test_every_leaf_of_the_state_is_written_where_it_stands(
    engine: ContinuousBatchingEngine, rows: int, chunks: int
):
    lowered, state = program_and_arguments(engine, rows, chunks)
    text = lowered.compile().as_text()
    table = re.search(r"input_output_alias=\{(.*?)\}, entry", text.replace("\n", " "))
    assert table is not None
    aliased = {int(number) for number in re.findall(r"\((\d+), \{\}", table[1])}
    # Arguments that the program doesn't use have no number: those written are used.
    written = [*jax.tree.leaves(state.pools), state.slots.history, state.slots.tables]
    assert len(aliased) >= len(written)
    assert len(aliased) == len(jax.tree.leaves(state))


@pytest.mark.parametrize(("rows", "chunks"), [(7, 0), (7, 4)], ids=["decode", "mixed"])
def test_no_program_holds_a_large_constant(
    engine: ContinuousBatchingEngine, rows: int, chunks: int
):
    lowered, _ = program_and_arguments(engine, rows, chunks)
    assert largest_constant(lowered.as_text()) < MEBIBYTE


def test_a_parameter_in_a_closure_would_be_found():
    held = jnp.arange(2 * MEBIBYTE // 4, dtype=jnp.float32) ** 2
    text = jax.jit(lambda x: x + held).lower(held).as_text()
    assert largest_constant(text) >= 2 * MEBIBYTE


def largest_constant(text: str) -> int:
    """Bytes of a StableHLO module's largest constant, those of one repeated value apart."""
    sizes = [0]
    for dense, shape in re.findall(r"stablehlo\.constant dense<(.*?)> : tensor<([^>]*)>", text):
        *dimensions, element = shape.split("x")
        if not dense.startswith(('"', "[", "dense_resource")) and "resource" not in dense:
            continue
        count = 1
        for dimension in dimensions:
            count *= int(dimension)
        sizes.append(count * int(re.sub(r"\D", "", element) or 8) // 8)
    return max(sizes)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 7, 33])
def test_odd_limits_compile_nothing_after_the_start(max_num_seqs: int):
    counter = CompileCounter(strict=True)
    counter.start()
    engine = make_engine(
        two_layer_params(), max_num_seqs=max_num_seqs, pages=200, max_num_batched_tokens=317
    )
    engine.compile_counter = counter
    engine.runner.rehearse()
    # Of the first request, that JAX's own small operations are compiled for.
    counter.mark_ready()
    requests = [random_request(f"o{number}", 1000 + number) for number in range(125)]
    outputs = run(engine, requests, arrivals=random.Random(1))
    assert {found[-1].finish_reason for found in outputs.values()} <= {"stop", "length"}
    assert len(outputs) == 125
    stats = engine.stats()
    assert stats.compiles_after_ready == 0
    assert stats.running == stats.waiting == 0
    engine.close()


@pytest.mark.parametrize("strict", [True, False])
def test_a_program_that_comes_late_raises_in_strict_mode_and_counts(
    engine: ContinuousBatchingEngine, monkeypatch: pytest.MonkeyPatch, strict: bool
):
    build = engine.runner.build

    def build_late(plan: Any) -> Any:
        jax.jit(lambda x: x * 3 + 1)(np.arange(11 + strict))
        return build(plan)

    monkeypatch.setattr(engine.runner, "build", build_late)
    with CompileCounter(strict=strict) as counter:
        counter.mark_ready()
        monkeypatch.setattr(engine, "compile_counter", counter)
        request = random_request("late", 1)
        if strict:
            with pytest.raises(RuntimeError, match="strict_compilation is on"):
                run(engine, [request])
            assert [one.finish_reason for one in engine.step()] == ["error"]
        else:
            assert run(engine, [request])["late"][-1].error is None
        assert engine.stats().compiles_after_ready >= 1


def test_one_prompt_in_every_row_gives_the_same_ids_and_logprobs(
    engine: ContinuousBatchingEngine,
):
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, ignore_eos=True)
    requests = [
        Request(f"s{row}", (4, 9, 11, 2), params) for row in range(engine.scheduler.max_num_seqs)
    ]
    first, *others = run(engine, requests).values()
    for other in others:
        assert ids_of(other) == ids_of(first)
        for one, same in zip(other, first, strict=True):
            assert one.logprobs is not None and same.logprobs is not None
            # Measured: 3e-6, for a row's place in a tile decides the order of sums on a CPU.
            assert one.logprobs[0].token == pytest.approx(same.logprobs[0].token, abs=1e-4)
