"""Latency of the engine in this process: time to first token, time per output token, and where a
step's time goes.

    python -m bench.latency --model DIR --shapes 1/256,1024/256 --batch-sizes 1,16,64 \\
        --output FILE.json

All requests of a row are submitted at once. The same run measures the device's read ceiling, what
the decode step takes when nothing but the device works, and checks the engine's greedy tokens
against `forward`. Exits with 1 where that check or a request fails.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax

from bench.ceilings import measure_ceilings
from bench.latency_rounds import Steady, random_requests, round_figures, run_round, steady_part
from bench.regret import measure_regret
from bench.results_file import run_facts, why_not_writable, write_results
from bench.step_bytes import StepBytes, read_share, step_bytes
from bench.step_trace import read_trace
from qwen35_jax.config import EngineConfig
from qwen35_jax.device_memory import reserve_device_memory
from qwen35_jax.engine_arguments import (
    add_cache_arguments,
    add_engine_arguments,
    add_seed_argument,
    engine_config,
    log_to_terminal,
)
from qwen35_jax.errors import USER_ERRORS, ConfigError
from qwen35_jax.loading import LoadedEngine, load_engine

TRACED_STEPS = 20
BACK_TO_BACK_STEPS = 30
REPEATS = 5
# Profiling sessions turn CUDA graphs off otherwise, and then the profile is of another step.
GRAPHS_WHILE_PROFILING = "--xla_enable_command_buffers_during_profiling=true"
COLUMNS = (
    *("prompt_tokens", "output_tokens", "batch", "ttft_ms", "tpot_ms", "steady_tpot_ms"),
    *("device_step_ms", "steady_over_device", "output_tokens_per_s", "read_share", "failed"),
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.latency",
        description="Measure TTFT, TPOT and the host's and the device's part of a step.",
        allow_abbrev=False,
    )
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    add_seed_argument(parser, help="seed of prompts and dummy weights (default: %(default)s)")
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default="1/256,1024/256",
        metavar="IN/OUT,...",
        help="prompt and output tokens of each row (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-sizes",
        type=_numbers,
        default="1,16",
        metavar="N,...",
        help="requests that run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=_numbers,
        default="",
        metavar="TOKENS,...",
        help="prompt lengths whose time to first token is measured alone (default: none)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=0, help="default: %(default)s, which is all")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help=f"profile {TRACED_STEPS} decode steps of the first shape at each batch size",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--commit", help="the code's commit (default: what git says)")
    return parser


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1 on, with commas between them")
    return numbers


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        prompt, separator, output = part.partition("/")
        if not (separator and prompt.isdecimal() and output.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not IN/OUT, as in 1024/256")
        if int(prompt) < 1 or int(output) < 1:
            raise argparse.ArgumentTypeError(f"{part}: both numbers must be at least 1")
        shapes.append((int(prompt), int(output)))
    return shapes


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.output and (why_not := why_not_writable(arguments.output)):
        parser.error(why_not)
    if arguments.trace:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {GRAPHS_WHILE_PROFILING}".strip()
    log_to_terminal()
    command = shlex.join(
        ["python", "-m", "bench.latency", *(sys.argv[1:] if argv is None else argv)]
    )
    try:
        config = engine_config(parser, arguments, seed=arguments.seed)
        run = Run(arguments, config, command)
        run.measure()
    except USER_ERRORS as error:
        print(f"bench.latency: error: {error}", file=sys.stderr)
        return 2
    print(markdown_table(run.rows))
    print(f"\nread ceiling {run.ceilings['read_gb_per_s']} GB/s; regret {run.more['regret']}")
    return run.exit_code


class Run:
    """One command's measurements. What is known is written after every row."""

    def __init__(self, arguments: argparse.Namespace, config: EngineConfig, command: str):
        self._arguments, self._config, self._command = arguments, config, command
        self.rows: list[dict[str, Any]] = []
        self.ceilings: dict[str, Any] = {}
        self.more: dict[str, Any] = {}

    def measure(self) -> None:
        arguments = self._arguments
        reserve_device_memory(self._config.gpu_memory_utilization)
        self._facts = run_facts(arguments.commit)
        self._tell("measuring ceilings")
        # Before the engine, which leaves no room for their arrays.
        self.ceilings = measure_ceilings()
        started = perf_counter()
        self._loaded = loaded = load_engine(self._config)
        ready = perf_counter() - started
        self._check_sizes()
        try:
            self._bytes = step_bytes(loaded.params.config)
            self.more["start"] = _start_figures(loaded, ready)
            self._tell("checking tokens against forward")
            self.more["regret"] = measure_regret(
                loaded.engine,
                loaded.params,
                vocabulary_size=loaded.tokenizer.vocabulary_size,
                max_model_len=loaded.max_model_len,
                seed=arguments.seed,
            )
            for length in arguments.prefill:
                self._add(self._prefill_row(length))
            for number, (prompt, output) in enumerate(arguments.shapes):
                for batch in arguments.batch_sizes:
                    self.more["memory"] = memory_figures(loaded)
                    self._add(self._row(prompt, output, batch, trace=number == 0))
        finally:
            loaded.engine.close()

    @property
    def exit_code(self) -> int:
        failed = any(row["failed"] for row in self.rows)
        return int(failed or not self.more["regret"]["passed"])

    def _check_sizes(self) -> None:
        """Before anything runs, what no row can run with."""
        arguments, loaded = self._arguments, self._loaded
        longest = max(prompt + output for prompt, output in arguments.shapes)
        longest = max([longest, *(length + 1 for length in arguments.prefill)])
        if longest > loaded.max_model_len:
            raise ConfigError(
                f"a row needs {longest} tokens of context; --max-model-len is "
                f"{loaded.max_model_len}"
            )
        most, room = max(arguments.batch_sizes), loaded.memory_plan.max_num_seqs
        if most > room:
            raise ConfigError(f"--batch-sizes has {most}; the engine runs {room} at once")

    def _row(self, prompt: int, output: int, batch: int, *, trace: bool) -> dict[str, Any]:
        self._tell(f"{prompt}/{output} x {batch}")
        engine = self._loaded.engine
        # Not the measured round's prompts, so that nothing of theirs can be kept.
        run_round(engine, self._requests(prompt, min(output, 8), batch, seed=1))
        one = run_round(engine, self._requests(prompt, output, batch, seed=2))
        row = {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "batch": batch,
            "sampling": self._sampling(),
            **round_figures(one, output_tokens=output),
        }
        steady = steady_part(one.steps, batch)
        if steady is None:
            return row
        device = back_to_back_seconds(engine.runner, steady.batch)
        row |= steady_figures(steady, device, self._bytes, batch, self.ceilings["read_gb_per_s"])
        if trace and self._arguments.trace:
            row["trace"] = self._trace(steady, batch)
        return row

    def _prefill_row(self, length: int) -> dict[str, Any]:
        self._tell(f"prefill {length}")
        rounds = [
            round_figures(
                run_round(self._loaded.engine, self._requests(length, 1, 1, seed=seed)),
                output_tokens=1,
            )
            for seed in range(3, 4 + REPEATS)
        ][1:]
        times = [one["ttft_ms"] for one in rounds if one["ttft_ms"] is not None]
        return {
            "prompt_tokens": length,
            "output_tokens": 1,
            "batch": 1,
            "ttft_ms": median(times) if times else None,
            "completed": sum(one["completed"] for one in rounds),
            "failed": sum(one["failed"] for one in rounds),
        }

    def _trace(self, steady: Steady, batch: int) -> dict[str, Any]:
        directory = self._arguments.trace / f"batch-{batch}"
        with jax.profiler.trace(str(directory)):
            back_to_back_seconds(
                self._loaded.engine.runner, steady.batch, steps=TRACED_STEPS, repeats=1
            )
        # The first step of back_to_back_seconds is not counted in its time, but traced.
        return read_trace(directory, TRACED_STEPS + 1).as_json()

    def _requests(self, prompt: int, output: int, batch: int, *, seed: int) -> list[Any]:
        return random_requests(
            batch,
            prompt_tokens=prompt,
            output_tokens=output,
            vocabulary_size=self._loaded.tokenizer.vocabulary_size,
            seed=1000 * self._arguments.seed + seed,
            sampling=self._sampling(),
        )

    def _sampling(self) -> dict[str, Any]:
        arguments = self._arguments
        return {
            "temperature": arguments.temperature,
            "top_k": arguments.top_k,
            "top_p": arguments.top_p,
        }

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._arguments.output is None:
            return
        config = self._config
        write_results(
            self._arguments.output,
            name="latency",
            command=self._command,
            facts=self._facts,
            model={"name": self._loaded.model_name, "description": self._loaded.description},
            flags={name: getattr(config, name) for name in type(config).__dataclass_fields__},
            ceilings=self.ceilings,
            rows=self.rows,
            more=self.more,
        )

    def _tell(self, what: str) -> None:
        print(f"bench.latency: {what} ...", file=sys.stderr, flush=True)


def back_to_back_seconds(
    runner: Any,
    batch: Any,
    *,
    steps: int = BACK_TO_BACK_STEPS,
    repeats: int = REPEATS,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Of one step when the device never waits for the host: dispatched one after the other.

    The rows' slots must belong to nobody any more. Their states go on, their positions stay.
    """
    batch = replace(batch, admitted=[])
    times = []
    results = runner.dispatch(batch).results
    jax.block_until_ready(results)
    for _ in range(repeats):
        started = clock()
        for _ in range(steps):
            results = runner.dispatch(batch).results
        jax.block_until_ready(results)
        times.append((clock() - started) / steps)
    return median(times)


def steady_figures(
    steady: Steady, device_seconds: float, bytes_: StepBytes, batch: int, gb_per_s: float
) -> dict[str, Any]:
    needed = bytes_.read(batch, steady.context)
    return {
        "steady_tpot_ms": round(1000 * steady.seconds, 4),
        "steady_steps": steady.steps,
        "device_step_ms": round(1000 * device_seconds, 4),
        "steady_over_device": round(steady.seconds / device_seconds, 4),
        "host_us": {name: round(time, 1) for name, time in steady.host_us.items()},
        "step_read_bytes": round(needed),
        "read_share": round(read_share(needed, steady.seconds, gb_per_s), 4),
    }


def memory_figures(loaded: LoadedEngine) -> dict[str, Any]:
    """What was planned, and the peak so far where the device says it."""
    planned = loaded.memory_plan.used_bytes
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is None:
        return {"planned_bytes": planned}
    return {
        "planned_bytes": planned,
        "peak_bytes": peak,
        "peak_over_planned": round(peak / planned, 4),
    }


def _start_figures(loaded: LoadedEngine, ready: float) -> dict[str, Any]:
    runner, counter = loaded.engine.runner, loaded.engine.compile_counter
    assert counter is not None
    return {
        "ready_seconds": round(ready, 2),
        "compile_seconds": round(runner.compile_seconds, 2),
        "rehearse_seconds": round(runner.rehearse_seconds, 2),
        "programs": runner.num_programs,
        "compiled": counter.num_compiled,
        "cache_hits": counter.num_cache_hits,
    }


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = ("-" if row.get(name) is None else str(row[name]) for name in COLUMNS)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
