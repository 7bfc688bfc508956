"""Latency of the engine in this process: time to first token, time per output token, and where a
step's time goes.

    python -m bench.latency --model DIR --shapes 1/256,1024/256 --batch-sizes 1,16,64 \\
        --max-num-seqs 64 --output FILE.json

All requests of a row are submitted at once. The same run measures the device's read ceiling and
what the decode step takes when nothing but the device works, and checks greedy tokens against
`forward`. Exit code 0: all is well. 1: a request failed, or tokens are not the model's. 2: it could
not run.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from bench.results_file import why_not_writable
from bench.step_trace import (
    MeasurementError,
    check_trace_folder,
    keep_graphs_while_profiling,
    trace_lines,
)
from qwen35_jax.engine_arguments import (
    add_cache_arguments,
    add_engine_arguments,
    add_seed_argument,
    engine_config,
)
from qwen35_jax.errors import USER_ERRORS

if TYPE_CHECKING:
    from bench.latency_run import LatencyRun

COLUMNS = {
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "batch": "batch",
    "temperature": "temperature",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "steady_tpot_ms": "steady TPOT ms",
    "device_step_ms": "device step ms",
    "steady_over_device": "steady / device",
    "output_tokens_per_s": "output tok/s",
    "read_share": "read share",
    "over_greedy": "over greedy",
    "failed": "failed",
}
# bf16 logits of the 4B shape move by about 0.02 with the order of a sum; a wrong model's greedy
# token is whole units behind.
MAX_REGRET = 0.1
# Options whose values are this machine's and no part of what was measured.
LOCAL_OPTIONS = ("--output", "--trace", "--commit", "--compilation-cache-dir")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.latency",
        description="Measure TTFT, TPOT, and the host's and the device's part of a step. Exit code "
        "0 says all is well, 1 that a request failed or that tokens are not the model's, 2 that it "
        "could not run.",
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
        help="requests that run at once, at most --max-num-seqs (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=_numbers,
        default="",
        metavar="TOKENS,...",
        help="prompt lengths whose time to first token is measured alone, greedily (default: none)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperatures,
        default="0",
        metavar="T,...",
        help="0 is greedy; each row is run at each temperature, so that 0,1 says what sampling "
        "costs (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="of sampled rows; 0 is all (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="of sampled rows (default: %(default)s)"
    )
    parser.add_argument(
        "--max-regret",
        type=float,
        default=MAX_REGRET,
        help="how far a greedy token's logit may be below the largest (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="profile 20 decode steps at each batch size after the longest prompt: an operation "
        "table for the results, and DIR/batch-N.trace.json.gz",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--commit", help="the code's commit (default: what git says)")
    return parser


def _numbers(text: str) -> list[int]:
    parts = text.split(",") if text else []
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: want numbers from 1 on, with commas between")
    return [int(part) for part in parts]


def _temperatures(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= number < math.inf for number in numbers) or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: want different numbers from 0 on, as in 0,1")
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
    started = perf_counter()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not arguments.batch_sizes:
        parser.error("--batch-sizes names none")
    if not arguments.max_regret >= 0:
        parser.error(f"--max-regret must be at least 0, not {arguments.max_regret}")
    if arguments.output and (why_not := why_not_writable(arguments.output)):
        parser.error(f"--output {why_not}")
    run: LatencyRun | None = None
    try:
        config = engine_config(parser, arguments, seed=arguments.seed)
        if arguments.trace:
            check_trace_folder(arguments.trace)
            if not keep_graphs_while_profiling():
                _tell(
                    "--trace: XLA_FLAGS turns CUDA graphs off in the profile, or JAX runs already"
                )
        # It brings in jax, which reads its environment first.
        from bench import latency_run

        words = sys.argv[1:] if argv is None else argv
        run = latency_run.LatencyRun(
            arguments, config, shown_command(words, config.model), started, _tell
        )
        run.measure()
        found = problems(run.rows, run.more)
    except USER_ERRORS as error:
        _tell(f"error: {error}")
        return 2
    except (OSError, MeasurementError) as error:
        _tell(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _tell("interrupted; the results hold the rows that were done")
        return 130
    finally:
        if run is not None and run.rows:
            print("\n".join(report(run.rows, run.ceilings, run.more)))
    for problem in found:
        _tell(f"FAILED: {problem}")
    return int(bool(found))


def shown_command(words: Sequence[str], model: str | None) -> str:
    """The command without what is this machine's own: a model's folder is DIR there."""
    shown: list[str] = []
    skip = False
    for word in words:
        name, has_value, value = word.partition("=")
        if skip:
            skip = False
        elif name in LOCAL_OPTIONS:
            skip = not has_value
        elif model is not None and Path(model).exists() and model in (word, value):
            shown.append(f"{name}=DIR" if value == model else "DIR")
        else:
            shown.append(word)
    return " ".join(["python -m bench.latency", *shown])


def problems(rows: Sequence[dict[str, Any]], more: dict[str, Any]) -> list[str]:
    """What the exit code is 1 for, in words."""
    found = [
        f"{row['failed']} requests of {row['prompt_tokens']}/{row['output_tokens']} x "
        f"{row['batch']}: {'; '.join(row.get('errors', ['ended early']))}"
        for row in rows
        if row["failed"]
    ]
    regret = more["regret"]
    if not regret["passed"]:
        reason = "; ".join(regret.get("errors", [])) or (
            f"the largest regret is {regret['max']}, the limit {regret['limit']}"
        )
        found.append(f"greedy tokens are not those of `forward`: {reason}")
    return found


def report(
    rows: Sequence[dict[str, Any]], ceilings: dict[str, Any], more: dict[str, Any]
) -> list[str]:
    """The results in Markdown lines; what a run cut short has not got is left out."""
    lines = ["", *markdown_table(rows), ""]
    matmuls = ", ".join(f"{shape} {rate:g}" for shape, rate in ceilings["matmul_tflops"].items())
    lines.append(f"Read ceiling {ceilings['read_gb_per_s']:,} GB/s; bf16 matmul TFLOP/s: {matmuls}")
    host = [
        f"{row['prompt_tokens']}/{row['output_tokens']} x {row['batch']}: "
        + ", ".join(f"{name} {time:,.0f}" for name, time in row["host_us"].items())
        for row in rows
        if "host_us" in row
    ]
    if host:
        lines += ["", "Host microseconds of a steady step (collect waits for the device):", *host]
    for name in ("start", "memory", "regret", "same_prompt"):
        if name in more:
            lines += ["", f"{name}: " + ", ".join(_pairs(more[name]))]
    for trace in more.get("traces", []):
        lines += ["", f"Decode step of {trace['batch']} rows, context {trace['prompt_tokens']} on:"]
        lines += trace_lines(trace["table"]) if "table" in trace else [trace["error"]]
    return lines


def markdown_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of the columns that any row has."""
    shown = {
        name: title for name, title in COLUMNS.items() if any(_cell(row, name) for row in rows)
    }
    lines = [f"| {' | '.join(shown.values())} |", "|" + "---|" * len(shown)]
    return lines + [f"| {' | '.join(_cell(row, name) or '-' for name in shown)} |" for row in rows]


def _cell(row: dict[str, Any], name: str) -> str:
    value = row["sampling"].get(name) if name == "temperature" else row.get(name)
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) and name != "temperature" else f"{value:g}"


def _pairs(figures: dict[str, Any]) -> list[str]:
    return [
        f"{name} {value:,}" if type(value) is int else f"{name} {value}"
        for name, value in figures.items()
        if not isinstance(value, dict)
    ]


def _tell(what: str) -> None:
    print(f"bench.latency: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
