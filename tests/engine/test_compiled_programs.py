"""The compiled programs: none comes late, none holds weights, the caches change in place."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.compile_cache import CompileCounter
from qwen35_jax.config import ModelConfig
from qwen35_jax.engine.runner import Batch, Dispatched, Runner
from qwen35_jax.llm import LLM
from qwen35_jax.model.paged import CachePools
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.step import Sizes, init_engine_state, new_packed, step_program
from tests.support.engines import (
    fast_compilation,
    ids_of,
    request,
    run,
    small_engine_config,
    small_reopened,
    write_two_layer_checkpoint,
)
from tests.support.mixed_requests import random_params, random_prompt
from tests.support.published_configs import published_config

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_layer_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return small_reopened().runner


def programs_of(runner: Runner) -> dict[str, Any]:
    steps = {f"rows {rows}, chunks {n}": one for (rows, n), one in runner._programs.items()}
    admissions = {f"admit {length}": one for length, one in runner._admissions.items()}
    assert len(steps) + len(admissions) == runner.num_programs >= 6
    return steps | admissions


# Nothing comes late


@pytest.mark.parametrize(
    ("max_num_seqs", "prompts"), [(1, 60), (3, 120), (7, 500), (33, 250)], ids=str
)
def test_nothing_is_compiled_for_requests_of_any_kind_under_odd_limits(
    checkpoint: Path, max_num_seqs: int, prompts: int
):
    config = small_engine_config(
        checkpoint,
        max_num_seqs=max_num_seqs,
        max_model_len=256,
        kv_cache_tokens=1024,
        strict_compilation=True,
    )
    draw = random.Random(max_num_seqs)
    # As many lengths as there are up to 200.
    asked = [list(random_prompt(draw, number % 200 + 1)) for number in range(prompts)]
    params = [
        replace(
            random_params(draw, longest=24),
            n=draw.choice([1, 1, 1, 3]),
            seed=draw.choice([None, 1]),
            stop=draw.choice([(), ("e", "the")]),
        )
        for _ in asked
    ]
    with fast_compilation(), LLM.from_config(config) as llm, CompileCounter() as counter:
        results = llm.generate(asked, params, use_tqdm=False)
        deltas = list(llm.stream(asked[0], replace(params[0], n=1, prompt_logprobs=None)))
        stats = llm.stats()
    assert [result.error for result in results] == [None] * prompts
    assert [len(result.outputs) for result in results] == [one.n for one in params]
    assert deltas[-1].finish_reason is not None
    assert stats.compiles_after_ready == 0
    assert (counter.num_compiled, counter.num_cache_hits) == (0, 0)


@pytest.fixture
def strict_llm(checkpoint: Path) -> Iterator[LLM]:
    config = small_engine_config(checkpoint, strict_compilation=True)
    with fast_compilation(), LLM.from_config(config) as llm:
        yield llm


def test_strict_mode_raises_on_a_late_program_and_goes_on(
    strict_llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    asked = request("r", (1, 2, 3), max_tokens=4)
    (before,) = strict_llm.generate([[1, 2, 3]], asked.params, use_tqdm=False)
    engine = strict_llm.loaded.engine
    dispatch = engine.runner.dispatch

    def with_a_late_program(batch: Batch) -> Dispatched:
        jax.jit(lambda x: 3 * x - 5)(np.ones(7, np.float32))
        return dispatch(batch)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "dispatch", with_a_late_program)
        with pytest.raises(RuntimeError, match="is not among the programs compiled before"):
            strict_llm.generate([[1, 2, 3]], asked.params, use_tqdm=False)
    assert strict_llm.stats().compiles_after_ready == 1
    (after,) = strict_llm.generate([[1, 2, 3]], asked.params, use_tqdm=False)
    assert after.outputs == before.outputs
    assert strict_llm.stats().compiles_after_ready == 1


# What they hold


def constant_bytes(program_text: str) -> Iterator[int]:
    """Of each constant in the text of an HLO module."""
    for dtype, dimensions in re.findall(r"= (\w+)\[([\d,]*)\][^=\n]*? constant\(", program_text):
        bits = int(re.sub(r"\D", "", dtype[:3]) or 8)
        yield prod(int(size) for size in dimensions.split(",") if size) * bits // 8


def test_the_constants_of_a_program_are_found():
    weights = np.random.default_rng(0).standard_normal((300, 50)).astype(np.float32)
    compiled = jax.jit(lambda x: x @ weights).lower(jnp.ones((2, 300))).compile()
    text = compiled.as_text()
    assert text is not None and max(constant_bytes(text)) == weights.nbytes


def test_programs_hold_no_weights_and_take_all_as_arguments(runner: Runner):
    # The model is tiny: its largest matrix has 164 kB, and a few constants are all there may be.
    for name, program in programs_of(runner).items():
        sizes = list(constant_bytes(program.as_text()))
        assert sizes and max(sizes) <= 1000, name
    state = jax.tree.leaves(runner._state)
    for (rows, chunks), program in runner._programs.items():
        arguments = jax.tree.leaves(program.in_avals)
        packed = new_packed(rows, chunks)
        expected = [leaf.shape for leaf in [*runner._leaves, *state, packed]]
        assert [argument.shape for argument in arguments] == expected


@pytest.mark.parametrize(("rows", "chunks"), [(1, 0), (16, 1)])
def test_programs_of_the_published_sizes_hold_no_large_constant(rows: int, chunks: int):
    config = ModelConfig.from_dict(published_config("4B"))
    config = config.replace(layer_types=config.layer_types[:4])
    params = Qwen35(config)
    sizes = Sizes(num_pages=5000, page_size=64, num_slots=17, max_model_len=262_144)
    state = jax.eval_shape(lambda: init_engine_state(config, sizes))
    program = step_program(params, rows, chunks, config.vocab_size)
    packed = jax.ShapeDtypeStruct(new_packed(rows, chunks).shape, jnp.int32)
    text = program.lower(jax.tree.leaves(params), state, packed).as_text()
    # A number alone between the brackets fills the whole array.
    literals = re.findall(r"constant dense(?:_resource)?<(?=[\[\"a-z])([^>]*)>", text)
    assert literals and sum(map(len, literals)) < MEGABYTE


def test_caches_are_given_back_in_the_arrays_that_they_came_in(runner: Runner):
    state = runner._state
    pools = {id(leaf) for leaf in jax.tree.leaves(state.pools)}
    leaves = jax.tree.leaves(state)
    assert isinstance(state.pools, CachePools) and len(pools) == 4
    for name, program in programs_of(runner).items():
        before_state = 0 if name.startswith("admit") else len(runner._leaves)
        (table,) = re.findall(r"input_output_alias=\{(.*?)\}, entry", program.as_text())
        aliases = {
            int(output): int(argument)
            for output, argument in re.findall(r"\{(\d+)\}: \((\d+), \{\}", table)
        }
        for place, leaf in enumerate(leaves):
            assert aliases.get(place) == before_state + place, (name, leaf.shape)
        assert len(aliases) == len(leaves), name


# From process to process

START = """
import json, sys
from pathlib import Path
from qwen35_jax.compile_cache import CompileCounter
from qwen35_jax.loading import load_engine
from tests.support.engines import ids_of, request, run, small_engine_config

checkpoint, cache = sys.argv[1:]
with CompileCounter() as counter:
    config = small_engine_config(Path(checkpoint), compilation_cache_dir=cache)
    engine = load_engine(config).engine
    outputs = run(engine, *(request(str(n), (n, 2, 3) * n, max_tokens=20) for n in range(1, 30)))
    engine.close()
answers = {name: ids_of(found) for name, found in outputs.items()}
print(json.dumps([counter.num_compiled, counter.num_cache_hits, answers]))
"""


@pytest.fixture(scope="module")
def two_starts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """[compiled, read from the cache, greedy ids by request] of two starts, one after the other."""
    cache = tmp_path_factory.mktemp("compile_cache")
    found = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", START, str(checkpoint), str(cache)],
            cwd=ROOT,
            env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found.append(json.loads(ran.stdout))
    return found


def test_a_second_start_finds_its_programs_on_disk(two_starts: list[Any]):
    (compiled, hits, _), (compiled_again, hits_again, _) = two_starts
    assert compiled >= 6 and hits <= compiled / 10
    assert hits_again / (compiled_again + hits_again) >= 0.95


def test_two_processes_give_the_same_greedy_ids(two_starts: list[Any]):
    answers = two_starts[0][2]
    assert len(answers) == 29 and all(len(ids) == 20 for ids in answers.values())
    assert answers == two_starts[1][2]


def test_the_same_prompt_in_every_row_gets_the_same_logits_in_every_row():
    requests = [request(f"r{row}", (5, 6, 7) * 9, max_tokens=30, logprobs=20) for row in range(9)]
    outputs = run(small_reopened(), *requests)
    tops = []
    for one in requests:
        found = outputs[one.request_id]
        assert ids_of(found) == ids_of(outputs["r0"])
        tops.append([dict(entry.top) for output in found for entry in output.logprobs or ()])
    for top in tops:
        assert len(top) == 30
        for entry, first in zip(top, tops[0], strict=True):
            # Exact within a step; prompts of other steps stand elsewhere in their products, which
            # is measured to change 5e-6.
            assert entry == pytest.approx(first, abs=1e-4)
