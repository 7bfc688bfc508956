"""The latency benchmark: arithmetic on known times, its options, and one short run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import latency
from bench.latency_rounds import Round, Step, Timeline, round_figures, run_round, steady_part
from bench.regret import measure_regret
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.engine.stats import HostSeconds
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import default_llm, default_reopened, fast_compilation


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
    figures = round_figures(Round(0.0, 2.0, timelines, []), output_tokens=3)
    assert figures == {
        "ttft_ms": pytest.approx(600.0),
        "tpot_ms": pytest.approx(300.0),
        "output_tokens_per_s": 3.0,
        "completed": 2,
        "failed": 1,
        "preemptions": 0,
        "errors": ["it broke"],
    }


def test_steady_steps_are_those_where_all_rows_decode():
    def step(ended: float, rows: int, collect: float) -> Step:
        return Step(ended, rows, 10.0 + rows, HostSeconds(collect=collect))

    steps = [step(0, 0, 0), step(5, 2, 4), step(6, 2, 4.5), step(7.5, 2, 5.5), step(9, 1, 6)]
    steady = steady_part(steps, 2)
    assert steady is not None
    assert (steady.steps, steady.seconds, steady.context) == (2, 1.25, 12.0)
    assert steady.host_us["collect"] == pytest.approx(0.75e6)
    assert steady_part(steps, 3) is None


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shapes", "1-4"], "'1-4' is not IN/OUT"),
        (["--shapes", "0/4"], "at least 1"),
        (["--batch-sizes", "0"], "numbers from 1 on"),
        (["--output", "/proc/none/file.json"], "can't be written"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        latency.main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's engine runs the programs that are compiled already."""
    counter = default_llm().loaded.engine.compile_counter

    def load(config: Any) -> Any:
        loaded = default_reopened(config)
        loaded.engine.compile_counter = counter
        return loaded

    monkeypatch.setattr(latency, "load_engine", load)
    # The other tests' engines go on with the counter.
    monkeypatch.setattr("qwen35_jax.engine.core.ContinuousBatchingEngine.close", lambda _: None)


@pytest.mark.usefixtures("opened")
def test_a_run_leaves_its_rows_and_what_they_are_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "latency.json"
    options = ["--shapes", "3/6", "--batch-sizes", "1,2", "--prefill", "70"]
    assert latency.main([*options, "--output", str(output)]) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert content["command"].startswith("python -m bench.latency --shapes 3/6")
    prefill, one, two = content["rows"]
    assert (prefill["prompt_tokens"], prefill["completed"], prefill["failed"]) == (70, 5, 0)
    for row, batch in ((one, 1), (two, 2)):
        assert (row["batch"], row["completed"], row["failed"]) == (batch, batch, 0)
        assert row["steady_over_device"] == pytest.approx(
            row["steady_tpot_ms"] / row["device_step_ms"], rel=0.01
        )
        assert row["read_share"] > 0
        assert set(row["host_us"]) == {"schedule", "build", "dispatch", "collect", "finish"}
    assert content["ceilings"]["read_gb_per_s"] > 0
    assert content["regret"]["passed"] is True
    assert "| 3 | 6 | 2 |" in capsys.readouterr().out


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shapes", "9000/9"], "a row needs 9009 tokens of context"),
        (["--batch-sizes", "999"], "--batch-sizes has 999; the engine runs 16 at once"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert latency.main(options) == 2
    assert said in capsys.readouterr().err


def test_tokens_that_are_not_the_models_are_found():
    llm = default_llm()

    class Wrong(FakeEngine):
        in_flight = None

    options: dict[str, Any] = {
        "vocabulary_size": llm.tokenizer.vocabulary_size,
        "max_model_len": 400,
    }
    right = measure_regret(llm.loaded.engine, llm.params, **options)
    assert right["passed"] and set(right["by_prompt_tokens"]) == {"5", "127"}
    wrong = measure_regret(Wrong(**options), llm.params, **options)
    assert not wrong["passed"]
    assert wrong["by_prompt_tokens"]["5"]["max"] > 1
