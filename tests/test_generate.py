"""`qwen35 generate`: the text alone on stdout, the rest on stderr."""

import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.runner import Runner
from qwen35_jax.engine.text_stream import TextDelta
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.generate import build_parser, main
from qwen35_jax.llm import LLM
from qwen35_jax.loading import LoadedEngine
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import default_llm, default_reopened, fast_compilation

PROMPT = ChatTemplate.built_in().render(
    [{"role": "user", "content": "What is the capital of France?"}], enable_thinking=False
)
EIGHT_TOKENS = ["--max-tokens", "8", "--ignore-eos"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ASK = ["--prompt", PROMPT, *EIGHT_TOKENS]


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35_jax.generate.log_to_terminal", lambda: None)


@pytest.fixture(autouse=True)
def configs(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configs of the engines that commands open, which are all on the default model."""
    opened: list[EngineConfig] = []
    default_llm()  # loaded for real, before the loader is replaced

    def load(config: EngineConfig) -> LoadedEngine:
        opened.append(config)
        return default_reopened(config)

    monkeypatch.setattr("qwen35_jax.llm.load_engine", load)
    return opened


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, SamplingParams]]:
    """What commands ask LLM.stream for; the answer is one word."""
    asked: list[tuple[str, SamplingParams]] = []

    def stream(self: LLM, prompt: str, params: SamplingParams) -> Iterator[TextDelta]:
        asked.append((prompt, params))
        yield TextDelta(text="word", token_ids=(1,), finish_reason="length")

    monkeypatch.setattr(LLM, "stream", stream)
    return asked


def text_of(prompt: str) -> str:
    (result,) = default_llm().generate(prompt, GREEDY, use_tqdm=False)
    return result.outputs[0].text


def test_stdout_gets_the_text_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    assert main(ASK) == 0
    printed = capsys.readouterr()
    assert printed.out == text_of(PROMPT) + "\n"
    description, summary = printed.err.splitlines()
    assert description == f"qwen3.5-tiny: {default_llm().loaded.description}"
    assert summary.startswith("[8 tokens, cut off at --max-tokens 8; first after ")
    assert summary.endswith(" tokens/s]")


def test_text_is_written_as_it_comes(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        flushed: list[str]

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    terminal = Terminal()
    terminal.flushed = []
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(ASK) == 0
    assert len(set(terminal.flushed)) > 4
    assert terminal.flushed[-1] == text_of(PROMPT) + "\n"


def test_several_prompts_are_completed_in_order(capsys: pytest.CaptureFixture[str]):
    assert main([*ASK, "--prompt", "Once upon"]) == 0
    printed = capsys.readouterr()
    assert printed.out == text_of(PROMPT) + "\n" + text_of("Once upon") + "\n"
    assert "--- prompt 2 of 2" in printed.err


def test_without_a_prompt_stdin_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(EIGHT_TOKENS) == 0
    printed = capsys.readouterr()
    assert printed.out == text_of(PROMPT) + "\n"
    assert "Ctrl-D" not in printed.err


def test_a_person_at_the_terminal_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], streamed: list[Any]
):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("Hello"))
    assert main([]) == 0
    assert "Ctrl-D" in capsys.readouterr().err
    assert streamed[0][0] == "Hello"


def test_stdin_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, configs: list[EngineConfig]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    with pytest.raises(InvalidRequestError, match="stdin is not utf-8 text"):
        main([])
    assert configs == []


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ([], "<|im_start|>assistant\n<think>\n"),
        (["--disable-thinking"], "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
    ids=["thinking", "no_thinking"],
)
def test_chat_puts_the_prompt_into_the_template(
    flags: list[str], end: str, streamed: list[tuple[str, SamplingParams]]
):
    assert main(["--prompt", "Hello", "--chat", *flags]) == 0
    ((prompt, _),) = streamed
    assert prompt == f"<|im_start|>user\nHello<|im_end|>\n{end}"


def test_chat_without_a_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, streamed: list[Any]
):
    def load(config: EngineConfig) -> LoadedEngine:
        return replace(default_reopened(config), directory=tmp_path)

    monkeypatch.setattr("qwen35_jax.llm.load_engine", load)
    with pytest.raises(InvalidRequestError, match="has no chat template; drop --chat"):
        main(["--prompt", "Hello", "--chat"])
    assert streamed == []


def test_flags_reach_the_request_and_the_engine(
    streamed: list[tuple[str, SamplingParams]], configs: list[EngineConfig]
):
    argv = (
        "some/model --prompt a --max-tokens 3 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 "
        "--stop x --stop y --ignore-eos --seed 5 --max-model-len 64 --max-num-seqs 2 "
        "--dtype float32 --load-format dummy --numerics transformers --max-num-batched-tokens 317 "
        "--gpu-memory-utilization 0.5 --kv-cache-tokens 1000 --block-size 16 "
        "--compilation-cache-dir none --strict-compilation"
    )
    assert main(argv.split()) == 0
    params = SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop=["x", "y"],
        ignore_eos=True, seed=5,
    )  # fmt: skip
    assert streamed == [("a", params)]
    assert configs == [
        EngineConfig(
            model="some/model",
            max_model_len=64,
            max_num_seqs=2,
            dtype="float32",
            load_format="dummy",
            numerics="transformers",
            max_num_batched_tokens=317,
            gpu_memory_utilization=0.5,
            kv_cache_tokens=1000,
            block_size=16,
            compilation_cache_dir="none",
            strict_compilation=True,
            seed=5,
        )
    ]


def test_the_defaults_are_greedy_on_the_default_model(
    streamed: list[tuple[str, SamplingParams]], configs: list[EngineConfig]
):
    assert main(["--prompt", "a"]) == 0
    assert streamed == [("a", SamplingParams(temperature=0.0, max_tokens=128, seed=0))]
    assert configs == [EngineConfig()]


def test_a_dry_run_prints_the_plan_and_asks_for_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    configs: list[EngineConfig],
):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["--dry-run", "--max-num-seqs", "3", "--max-model-len", "64"]) == 0
    assert "\n3 sequences at once, each of up to 64 tokens" in capsys.readouterr().out
    assert configs == []


def test_help_explains_every_flag_and_every_field_of_the_config_has_one():
    actions = build_parser()._actions
    assert all(action.help for action in actions)
    fields = set(EngineConfig.__dataclass_fields__)
    assert fields <= {action.dest for action in actions}


def test_one_token_has_no_rate(capsys: pytest.CaptureFixture[str], streamed: list[Any]):
    assert main(["--prompt", "a"]) == 0
    summary = capsys.readouterr().err.splitlines()[-1]
    assert summary.startswith("[1 tokens, length; first after")
    assert "tokens/s" not in summary


def test_a_device_failure_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nand much more")

    monkeypatch.setattr(Runner, "dispatch", fail)
    assert main(ASK) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[1:] == [
        "qwen35 generate: error: the device failed: RESOURCE_EXHAUSTED: no memory"
    ]


def test_progress_messages_go_to_stderr_and_stay_out_of_other_loggers():
    from qwen35_jax.engine_arguments import log_to_terminal

    package, root = logging.getLogger("qwen35_jax"), logging.getLogger()
    before = (package.handlers, package.propagate, package.level, list(root.handlers))
    try:
        log_to_terminal()
        log_to_terminal()
        (handler,) = package.handlers
        assert isinstance(handler, logging.StreamHandler)
        assert handler.stream is sys.stderr
        assert (package.propagate, package.level) == (False, logging.INFO)
    finally:
        package.handlers, package.propagate, level, root.handlers = before
        package.setLevel(level)
