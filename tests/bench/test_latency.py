"""The latency benchmark: arithmetic on known times, its options, and short runs."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from bench import latency, latency_run, regret
from bench.latency_rounds import (
    Round,
    Step,
    Timeline,
    random_requests,
    round_figures,
    run_round,
    steady_part,
    step_of,
)
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.engine.stats import HostSeconds
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import default_reopened, fast_compilation


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def test_first_token_and_gaps_are_taken_from_the_clock():
    timelines = {
        "a": Timeline(0.0, [0.5, 0.7, 0.9], [1, 2, 3], "length"),
        "b": Timeline(0.0, [0.7, 1.1, 1.5], [1, 2, 3], "length"),
        "short": Timeline(0.0, [9.0], [1], "error", "it broke"),
    }
    figures = round_figures(Round(0.0, 2.0, timelines, [], 5), output_tokens=3)
    assert figures == {
        "ttft_ms": pytest.approx(600.0),
        "tpot_ms": pytest.approx(300.0),
        "output_tokens_per_s": 3.0,
        "completed": 2,
        "failed": 1,
        "preemptions": 5,
        "errors": ["it broke"],
    }


def test_a_single_token_has_no_time_per_token():
    figures = round_figures(
        Round(0, 1, {"a": Timeline(0, [0.5], [1], "length")}, []), output_tokens=1
    )
    assert (figures["ttft_ms"], figures["tpot_ms"]) == (500.0, None)


def test_steady_steps_are_those_where_all_rows_decode():
    def step(ended: float, rows: int, collect: float, batch: str = "") -> Step:
        return Step(ended, rows, 10.0 + rows, HostSeconds(collect=collect), batch)

    steps = [
        step(0, 0, 0),
        step(5, 2, 4, "first"),
        step(6, 2, 4.5, "middle"),
        step(7.5, 2, 5.5, "last"),
        step(9, 1, 6),
    ]
    steady = steady_part(steps, 2)
    assert steady is not None
    # From 5 to 6 and from 6 to 7.5.
    assert (steady.steps, steady.seconds, steady.context) == (2, 1.25, 12.0)
    assert steady.host_us["collect"] == pytest.approx(0.75e6)
    assert steady.batch == "middle"
    assert steady_part(steps, 3) is None


def test_a_step_says_how_far_its_rows_see():
    """Two rows of a program of four, at positions 9 and 19."""
    packed = np.asarray([[1, 9, 5], [2, 19, 6], [0, 0, 0], [0, 0, 0]], np.int32).reshape(-1)
    batch = SimpleNamespace(size=(4, 0), packed=packed, sampling=["a", "b"])
    engine: Any = FakeEngine(vocabulary_size=9)
    engine.in_flight = SimpleNamespace(batch=batch)
    found = step_of(engine, 3.0)
    assert (found.ended, found.rows, found.context, found.batch) == (3.0, 2, 15.0, batch)
    batch.size = (4, 1)
    assert step_of(engine, 3.0).rows == 0
    engine.in_flight = None
    assert step_of(engine, 3.0).rows == 0


def test_a_round_ends_with_its_last_request():
    class Engine(FakeEngine):
        in_flight = None

    clock = iter(range(100))
    requests = [Request(f"r{n}", (1, n), SamplingParams(max_tokens=2 + n)) for n in range(2)]
    one = run_round(Engine(vocabulary_size=9), requests, clock=lambda: float(next(clock)))
    # 0 starts, 1 and 2 submit, then a step each.
    assert one.timelines["r0"].tokens == [3.0, 4.0]
    assert one.timelines["r1"].tokens == [3.0, 4.0, 5.0]
    assert (one.timelines["r1"].ttft, one.timelines["r1"].tpot) == (1.0, 1.0)


def test_requests_are_random_exact_and_the_same_for_one_seed():
    sizes: dict[str, Any] = {"prompt_tokens": 30, "output_tokens": 7, "vocabulary_size": 50}
    options: dict[str, Any] = sizes | {"sampling": {"temperature": 1.0, "top_k": 20}}
    first, second = random_requests(2, seed=3, **options)
    assert len(first.prompt_token_ids) == 30 and max(first.prompt_token_ids) < 50
    assert first.prompt_token_ids != second.prompt_token_ids
    assert (first.params.max_tokens, first.params.ignore_eos, first.params.top_k) == (7, True, 20)
    assert first.params.seed != second.params.seed
    assert random_requests(2, seed=3, **options) == [first, second]
    assert random_requests(2, seed=4, **options) != [first, second]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shapes", "1-4"], "'1-4' is not IN/OUT"),
        (["--shapes", "0/4"], "at least 1"),
        (["--batch-sizes", "0"], "numbers from 1 on"),
        (["--batch-sizes", "two"], "numbers from 1 on"),
        (["--batch-sizes", "2,"], "numbers from 1 on"),
        (["--batch-sizes", ""], "--batch-sizes names none"),
        (["--prefill", "-3"], "numbers from 1 on"),
        (["--temperature", "hot"], "numbers from 0 on"),
        (["--temperature", "0,0"], "different numbers"),
        (["--temperature", "nan"], "numbers from 0 on"),
        (["--max-regret", "nan"], "--max-regret must be at least 0"),
        (["--output", "/proc/none/file.json"], "can't be written"),
        (["--batch", "2"], "unrecognized arguments"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        latency.main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--shapes", "9000/9"],
            "--shapes has a row of 9009 tokens, more than the context of 8192",
        ),
        (["--prefill", "8192"], "--prefill has a row of 8193 tokens"),
        (["--batch-sizes", "999"], "--batch-sizes has 999, but the engine runs 16 requests"),
        (["--top-k", "5"], "--top-k and --top-p choose nothing at --temperature 0"),
        (["--temperature", "1", "--top-p", "2"], "top_p must be in (0, 1], not 2.0"),
        (["--trace", "/proc/none/trace"], "--trace /proc/none/trace can't be written"),
        (["--model", "no-such/folder/here"], "no-such/folder/here"),
    ],
)
def test_what_cannot_run_is_one_line_before_any_weight_is_read(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(latency_run, "load_engine", None)
    assert latency.main(options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("bench.latency: error: ") and said in line


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's engine runs the programs that are compiled already."""
    monkeypatch.setattr(latency_run, "load_engine", default_reopened)
    # The other tests' engines share the programs.
    monkeypatch.setattr(ContinuousBatchingEngine, "close", lambda _: None)
    # The programs are compiled fast and run slowly.
    monkeypatch.setattr(latency_run, "BACK_TO_BACK_STEPS", 2)
    monkeypatch.setattr(regret, "PROMPTS", (3, 20))
    monkeypatch.setattr(regret, "NEW_TOKENS", 4)


@pytest.mark.usefixtures("opened")
def test_a_run_leaves_its_rows_and_what_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(latency_run, "TRACED_STEPS", 4)
    output, trace = tmp_path / "latency.json", tmp_path / "trace"
    options = ["--shapes", "3/6", "--batch-sizes", "1,2", "--prefill", "70"]
    options += ["--temperature", "0,1", "--top-k", "20", "--trace", str(trace)]
    assert latency.main([*options, "--output", str(output)]) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert content["command"] == (
        "python -m bench.latency --shapes 3/6 --batch-sizes 1,2 --prefill 70 --temperature 0,1 "
        "--top-k 20"
    )
    *rows, prefill = content["rows"]
    assert [(row["batch"], row["sampling"]["temperature"]) for row in rows] == [
        *((1, 0), (1, 1), (2, 0), (2, 1))
    ]
    for row in rows:
        assert (row["prompt_tokens"], row["output_tokens"]) == (3, 6)
        assert (row["completed"], row["failed"], row["preemptions"]) == (row["batch"], 0, 0)
        assert row["steady_over_device"] == pytest.approx(
            row["steady_tpot_ms"] / row["device_step_ms"], rel=0.01
        )
        # Of tokens 2 to 6: the step for token n sees the prompt and n - 1 tokens.
        assert 4 < row["context"] < 8
        assert row["read_share"] > 0
        assert set(row["host_us"]) == {"schedule", "build", "dispatch", "collect", "finish"}
        assert ("over_greedy" in row) == (row["sampling"]["temperature"] == 1)
    assert rows[1]["over_greedy"] == pytest.approx(
        rows[1]["steady_tpot_ms"] / rows[0]["steady_tpot_ms"], rel=0.01
    )
    assert (prefill["prompt_tokens"], prefill["completed"], prefill["failed"]) == (70, 3, 0)
    assert prefill["prompt_tokens_per_s"] == pytest.approx(70_000 / prefill["ttft_ms"], rel=0.01)
    assert content["ceilings"]["read_gb_per_s"] > 0
    assert content["start"]["programs"] > 0
    assert content["memory"]["planned_bytes"] > 0
    assert content["regret"]["passed"] is True
    assert content["same_prompt"]["rows_that_differ"] == 0
    assert "model" not in content["flags"] and content["flags"]["max_num_seqs"] == 16
    for one, batch in zip(content["traces"], (1, 2), strict=True):
        assert (one["batch"], one["table"]["steps"]) == (batch, 4)
        # Whole steps: what a step runs once was profiled as often as there are steps.
        assert one["table"]["single_ops"][0]["calls"] >= 1
        assert (trace / f"batch-{batch}.trace.json.gz").is_file()
    said = capsys.readouterr()
    assert "| 3 | 6 | 2 | 1 |" in said.out
    assert "us of device time" in said.out
    assert "3/6 x 2, temperature 1" in said.err


@pytest.mark.usefixtures("opened")
def test_tokens_that_are_not_the_models_fail_the_run_after_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    figures = {"passed": False, "max": 3.5, "limit": 0.25}
    seen: dict[str, Any] = {}

    def measure(*_: object, **options: Any) -> dict[str, Any]:
        seen.update(options)
        return figures

    monkeypatch.setattr(latency_run, "measure_regret", measure)
    output = tmp_path / "latency.json"
    options = ["--shapes", "2/3", "--batch-sizes", "1", "--max-regret", "0.25", "--seed", "7"]
    assert latency.main([*options, "--output", str(output)]) == 1
    assert (seen["most"], seen["seed"]) == (0.25, 7)
    assert json.loads(output.read_text(encoding="utf-8"))["regret"] == figures
    assert "FAILED: greedy tokens are not those" in capsys.readouterr().err


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (jax.errors.JaxRuntimeError("out of memory\nmore"), 1, "the device failed: out of memory"),
    ],
)
def test_a_run_that_is_cut_short_leaves_the_rows_that_were_done(
    raised: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(latency_run, "compare_rows", fail)
    output = tmp_path / "latency.json"
    options = ["--shapes", "2/3", "--batch-sizes", "1", "--output", str(output)]
    assert latency.main(options) == code
    assert len(json.loads(output.read_text(encoding="utf-8"))["rows"]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and "| 2 | 3 | 1 |" in captured.out
    assert "Traceback" not in captured.err


def row(**fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": 1, "output_tokens": 2, "batch": 3, "failed": 0} | fields


def test_what_failed_is_said_in_words():
    good = {"regret": {"passed": True}}
    assert latency.problems([row()], good) == []
    assert latency.problems([row(failed=2, errors=["a", "b"])], good) == [
        "2 requests of 1/2 x 3: a; b"
    ]
    assert latency.problems([row(failed=1)], good) == ["1 requests of 1/2 x 3: ended early"]
    bad = {"passed": False, "max": 0.4, "limit": 0.1}
    assert latency.problems([], {"regret": bad}) == [
        "greedy tokens are not those of `forward`: the largest regret is 0.4, the limit 0.1"
    ]


def test_the_shown_command_holds_nothing_of_this_machine(tmp_path: Path):
    folder = str(tmp_path)
    words = ["--model", folder, "--seed", "1", "--output", "a", "--trace=b", "--shapes", "1/2"]
    assert latency.shown_command(words, folder) == (
        "python -m bench.latency --model DIR --seed 1 --shapes 1/2"
    )
    assert latency.shown_command([f"--model={folder}"], folder).endswith(" --model=DIR")
    assert latency.shown_command([folder, "--commit", "x"], folder).endswith(" DIR")
    assert latency.shown_command(["owner/name"], "owner/name").endswith(" owner/name")


def test_a_table_has_the_columns_that_are_known():
    greedy = {"temperature": 0.0}
    lines = latency.markdown_table([row(sampling=greedy, ttft_ms=1234.5), row(sampling=greedy)])
    assert lines == [
        "| prompt | output | batch | temperature | TTFT ms | failed |",
        "|---|---|---|---|---|---|",
        "| 1 | 2 | 3 | 0 | 1,234.500 | 0 |",
        "| 1 | 2 | 3 | 0 | - | 0 |",
    ]


def test_every_option_has_help():
    parser = latency.make_parser()
    nameless = [action.dest for action in parser._actions if not action.help]
    assert nameless == []
    assert argparse.SUPPRESS not in [action.help for action in parser._actions]
