"""What bench.latency measures, in order; what is known is written after every row."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax

from bench.ceilings import measure_ceilings, seconds_a_call
from bench.latency_figures import memory_figures, over_greedy, start_figures, steady_figures
from bench.latency_rounds import random_requests, round_figures, run_round, steady_part
from bench.regret import compare_rows, measure_regret
from bench.results_file import run_facts, write_results
from bench.step_bytes import step_bytes
from bench.step_trace import MeasurementError, TraceError, captured, read_trace
from qwen35_jax.config import EngineConfig
from qwen35_jax.device_memory import reserve_device_memory
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.engine_arguments import log_to_terminal
from qwen35_jax.errors import ConfigError
from qwen35_jax.loading import load_engine, plan_for
from qwen35_jax.model.transformer import parameter_bytes, parameter_count
from qwen35_jax.model_files import find_model
from qwen35_jax.sampling_params import SamplingParams

TRACED_STEPS = 20
# Before the profile begins: what starting it or a mixed step before it left behind is over.
STEPS_BEFORE_A_TRACE = 3
BACK_TO_BACK_STEPS = 30
WARM_UP_TOKENS = 8
REPEATS = 3

GREEDY: dict[str, Any] = {"temperature": 0.0}
# Fields of EngineConfig that are this machine's own.
LOCAL_FIELDS = ("model", "compilation_cache_dir")


class LatencyRun:
    """One command's measurements: rows, ceilings and more, as far as they are known.

    arguments: of bench.latency's parser. started: perf_counter() when the command began. tell:
    prints a line of progress.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        config: EngineConfig,
        command: str,
        started: float,
        tell: Callable[[str], None],
    ):
        self._arguments, self._config, self._command = arguments, config, command
        self._started, self._tell = started, tell
        self.rows: list[dict[str, Any]] = []
        self.ceilings: dict[str, Any] = {}
        self.more: dict[str, Any] = {}

    def measure(self) -> None:
        """Raises ConfigError, InvalidRequestError, CheckpointError or TokenizerError before the
        work; MeasurementError where the device fails in it; OSError."""
        try:
            self._measure()
        except jax.errors.JaxRuntimeError as error:
            raise MeasurementError(f"the device failed: {str(error).splitlines()[0]}") from None

    def _measure(self) -> None:
        arguments = self._arguments
        samplings = self._samplings()
        self._check_sizes()
        # From here on: the checks above say what loading says once more.
        log_to_terminal()
        # Before the engine, which leaves no room for their arrays, and has graphs that a program
        # compiled later would throw out.
        self._tell("measuring the ceilings ...")
        before = perf_counter()
        self._facts = run_facts(arguments.commit)
        self.ceilings = measure_ceilings()
        aside = perf_counter() - before
        self._peak_before = _peak_bytes()
        self._loaded = loaded = load_engine(self._config)
        try:
            ready = perf_counter()
            self.more["start"] = start_figures(
                loaded, ready - before - aside, ready - self._started - aside
            )
            self._bytes = step_bytes(loaded.params.config)
            for prompt, output in arguments.shapes:
                for batch in arguments.batch_sizes:
                    for sampling in samplings:
                        self._add(self._row(prompt, output, batch, sampling))
            for length in arguments.prefill:
                self._add(self._prefill_row(length))
            # After the rows: its program would cost them their graphs, and its arrays the peak.
            self._check_tokens()
            if arguments.trace:
                self._trace_all(samplings[0])
        finally:
            loaded.engine.close()

    def _samplings(self) -> list[dict[str, Any]]:
        """One a temperature. Raises InvalidRequestError."""
        arguments = self._arguments
        filters = {"top_k": arguments.top_k, "top_p": arguments.top_p}
        samplings: list[dict[str, Any]] = [
            {"temperature": temperature, **filters} if temperature else GREEDY
            for temperature in arguments.temperature
        ]
        for sampling in samplings:
            SamplingParams(**sampling)
        if samplings == [GREEDY] and filters != {"top_k": 0, "top_p": 1.0}:
            raise ConfigError(
                "--top-k and --top-p choose nothing at --temperature 0: add --temperature 0,1"
            )
        return samplings

    def _check_sizes(self) -> None:
        """Before anything is read, what no row can run with."""
        arguments = self._arguments
        reserve_device_memory(self._config.gpu_memory_utilization)
        files = find_model(self._config)
        for option, needed in (
            ("--shapes", max(prompt + output for prompt, output in arguments.shapes)),
            ("--prefill", max((length + 1 for length in arguments.prefill), default=0)),
        ):
            if needed > files.max_model_len:
                raise ConfigError(
                    f"{option} has a row of {needed} tokens, more than the context of "
                    f"{files.max_model_len}; raise --max-model-len or leave it out"
                )
        most, plan = max(arguments.batch_sizes), plan_for(files, self._config)
        if most > plan.max_num_seqs:
            raise ConfigError(
                f"--batch-sizes has {most}, but the engine runs {plan.max_num_seqs} requests at "
                f"once: raise --max-num-seqs ({self._config.max_num_seqs}) or the memory it has"
            )

    def _row(
        self, prompt: int, output: int, batch: int, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        self._tell(f"{prompt}/{output} x {batch}, temperature {sampling['temperature']:g} ...")
        engine = self._loaded.engine
        # Other prompts than the measured round's, so that nothing of theirs can be kept.
        warm_up = min(output, WARM_UP_TOKENS)
        run_round(engine, self._requests(prompt, warm_up, batch, sampling, seed=1))
        one = run_round(engine, self._requests(prompt, output, batch, sampling, seed=2))
        row = {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "batch": batch,
            "sampling": sampling,
            **round_figures(one, output_tokens=output),
        }
        steady = steady_part(one.steps, batch)
        if steady is None:
            if output > 2:
                self._tell(f"no step decoded all {batch} rows: no steady TPOT")
            return row
        device = back_to_back_seconds(engine, steady.batch, calls=BACK_TO_BACK_STEPS)
        row |= steady_figures(steady, device, self._bytes, batch, self.ceilings["read_gb_per_s"])
        ratio = over_greedy(row, self.rows)
        return row if ratio is None else row | {"over_greedy": ratio}

    def _prefill_row(self, length: int) -> dict[str, Any]:
        self._tell(f"prefill of {length} ...")
        rounds = [
            run_round(self._loaded.engine, self._requests(length, 1, 1, GREEDY, seed=3 + number))
            for number in range(1 + REPEATS)
        ][1:]
        figures = [round_figures(one, output_tokens=1) for one in rounds]
        times = [one["ttft_ms"] for one in figures if one["ttft_ms"] is not None]
        ttft = median(times) if times else None
        return {
            "prompt_tokens": length,
            "output_tokens": 1,
            "batch": 1,
            "sampling": GREEDY,
            "ttft_ms": ttft,
            "prompt_tokens_per_s": round(1000 * length / ttft) if ttft else None,
            "completed": sum(one["completed"] for one in figures),
            "failed": sum(one["failed"] for one in figures),
        }

    def _check_tokens(self) -> None:
        loaded, batch = self._loaded, max(self._arguments.batch_sizes)
        sizes = {
            "vocabulary_size": loaded.tokenizer.vocabulary_size,
            "max_model_len": loaded.max_model_len,
            "seed": self._arguments.seed,
        }
        self._tell("checking greedy tokens against forward ...")
        self.more["same_prompt"] = compare_rows(loaded.engine, batch, **sizes)
        self.more["regret"] = measure_regret(
            loaded.engine, loaded.params, most=self._arguments.max_regret, **sizes
        )
        self._write()

    def _trace_all(self, sampling: dict[str, Any]) -> None:
        """The rows are done: profiling may slow what comes after it."""
        prompt = max(prompt for prompt, _ in self._arguments.shapes)
        traces = self.more["traces"] = []
        for batch in self._arguments.batch_sizes:
            self._tell(f"profiling decode steps of {batch} rows ...")
            trace = {"prompt_tokens": prompt, "batch": batch, "sampling": sampling}
            output = self._loaded.max_model_len - prompt
            requests = self._requests(prompt, output, batch, sampling, seed=4)
            try:
                path = trace_decode(self._loaded.engine, requests, self._arguments.trace)
                trace["table"] = read_trace(path, steps=TRACED_STEPS)
            except TraceError as error:
                self._tell(str(error))
                trace["error"] = str(error)
            traces.append(trace)
            self._write()

    def _requests(
        self, prompt: int, output: int, batch: int, sampling: dict[str, Any], *, seed: int
    ) -> list[Request]:
        return random_requests(
            batch,
            prompt_tokens=prompt,
            output_tokens=output,
            vocabulary_size=self._loaded.tokenizer.vocabulary_size,
            seed=1000 * abs(self._arguments.seed) + seed,
            sampling=sampling,
        )

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.more["memory"] = memory_figures(
            self._loaded.memory_plan.used_bytes, _peak_bytes(), self._peak_before
        )
        self._write()

    def _write(self) -> None:
        if self._arguments.output is None:
            return
        config, params = self._config, self._loaded.params
        flags = {name: getattr(config, name) for name in type(config).__dataclass_fields__}
        for name in LOCAL_FIELDS:
            del flags[name]
        write_results(
            self._arguments.output,
            name="latency",
            command=self._command,
            facts=self._facts,
            model={
                "name": Path(self._loaded.model_name).name,
                "parameters": parameter_count(params),
                "bytes": parameter_bytes(params),
                "dtype": params.config.dtype,
            },
            flags=flags,
            ceilings=self.ceilings,
            rows=self.rows,
            more=self.more,
        )


def back_to_back_seconds(engine: ContinuousBatchingEngine, batch: Any, *, calls: int) -> float:
    """Of one step when the device never waits for the host: dispatched one after the other.

    batch: of decode rows. The same rows are run again at the same positions, so their sequences
    must have ended: what it writes is then in slots and pages of nobody, where new owners read
    nothing that they have not written.
    """
    assert not engine.has_work() and batch.size[1] == 0 and not batch.admitted
    return seconds_a_call(
        lambda: engine.runner.dispatch(batch).results, calls=calls, repeats=REPEATS
    )


def trace_decode(
    engine: ContinuousBatchingEngine, requests: Sequence[Request], folder: Path
) -> Path:
    """Profile TRACED_STEPS steps that decode all requests and do nothing else.

    The device is idle when the profile begins and when it ends, so that it holds whole steps. Ends
    the requests. Raises TraceError where there are no such steps.
    """
    rows = len(requests)
    for request in requests:
        engine.submit(request)
    try:
        settled = 0
        while engine.has_work() and settled < STEPS_BEFORE_A_TRACE:
            engine.step()
            settled = settled + 1 if _decodes(engine, rows) else 0
        if settled:
            _wait(engine)
            with captured(folder, f"batch-{rows}") as path:
                for _ in range(TRACED_STEPS):
                    engine.step()
                    settled += _decodes(engine, rows)
                _wait(engine)
            if settled == STEPS_BEFORE_A_TRACE + TRACED_STEPS:
                return path
        raise TraceError(f"no {TRACED_STEPS} steps in a row decoded all {rows} rows")
    finally:
        for request in requests:
            engine.abort(request.request_id)
        while engine.has_work():
            engine.step()


def _decodes(engine: ContinuousBatchingEngine, rows: int) -> bool:
    step = engine.in_flight
    return step is not None and step.batch.size[1] == 0 and len(step.batch.sampling) == rows


def _wait(engine: ContinuousBatchingEngine) -> None:
    if engine.in_flight is not None:
        jax.block_until_ready(engine.in_flight.results)


def _peak_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
