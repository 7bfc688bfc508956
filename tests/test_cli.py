"""The command line: help, exit codes, and one line for whatever the user can mend."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen35_jax import __version__
from qwen35_jax.cli import COMMANDS, main
from tests.support.checkpoints import INDEX_NAME, SHARD_NAMES
from tests.support.engines import fast_compilation, write_two_layer_checkpoint

REPOSITORY = Path(__file__).parents[1]

ENGINE_FLAGS = [
    *("--max-model-len", "--max-num-seqs", "--dtype", "--load-format", "--numerics", "--seed"),
]
CACHE_FLAGS = [
    *("--max-num-batched-tokens", "--gpu-memory-utilization", "--kv-cache-tokens"),
    *("--block-size", "--compilation-cache-dir", "--strict-compilation", "--dry-run"),
]
FLAGS = {
    "serve": [
        *CACHE_FLAGS,
        *("--model", "--host", "--port", "--served-model-name", "--stuck-after-seconds"),
    ],
    "generate": [
        *CACHE_FLAGS,
        *("--model", "--prompt", "--chat", "--disable-thinking", "--max-tokens", "--temperature"),
        *("--top-p", "--top-k", "--min-p", "--stop", "--ignore-eos"),
    ],
    "verify": [
        *("--prompt-lengths", "--steps", "--reference-device", "--reference-python", "--json"),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_two_layer_checkpoint(tmp_path / "model")


def error_line(printed: str) -> str:
    """The error line; the progress and log lines before it are no errors."""
    assert "Traceback" not in printed
    *_, last = printed.splitlines()
    assert [line for line in printed.splitlines() if "error:" in line] == [last]
    return last


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_flag_with_a_text(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: qwen35 {command}")
    listed = {line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")}
    assert listed == {*ENGINE_FLAGS, *FLAGS[command]}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and line in text for name, (_, line) in COMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"qwen35-jax {__version__}\n", "")


def test_no_command_prints_the_help_and_exits_with_2(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["sevre"], ["--sevre", "generate"]], ids=str)
def test_an_unknown_command_or_flag_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "sevre" in error_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "argv", "said"),
    [
        ("generate", ["one", "--model", "two"], "give the model once"),
        ("generate", ["--disable-thinking"], "--disable-thinking needs --chat"),
        ("generate", ["--dtype", "float16"], "invalid choice: 'float16'"),
        ("generate", ["--max-tokens", "many"], "invalid int value: 'many'"),
        ("generate", ["--unknown"], "unrecognized arguments: --unknown"),
        ("verify", [], "required: MODEL"),
    ],
)
def test_wrong_flags_are_refused_by_their_commands_parser(
    command: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main([command, *argv])
    assert ended.value.code == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith(f"qwen35 {command}: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1, not 0"),
        (["--temperature", "-1"], "temperature must be"),
        (["--top-p", "0"], "top_p must be"),
        (["--top-k", "-2"], "top_k must be"),
        (["--min-p", "nan"], "min_p must be"),
        (["--stop", ""], "stop must be"),
        (["--seed", str(2**63)], "seed must be"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-model-len", "-5"], "max_model_len"),
        (["", "--prompt", "a"], "the model's name is empty"),
        (["--model", "", "--prompt", "a"], "the model's name is empty"),
        (["./no/such/directory", "--prompt", "a"], "directory ./no/such/directory does not exist"),
        (
            ["nosuchmodel", "--prompt", "a"],
            "'nosuchmodel' is neither a directory here nor a hub id",
        ),
        (
            ["someone/something", "--prompt", "a"],
            "someone/something is no directory here",
        ),
    ],
    ids=str,
)
def test_bad_values_are_one_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in error_line(printed.err)


def _corrupt(directory: Path) -> str:
    (directory / SHARD_NAMES[0]).write_bytes(b"\xff" * 100)
    return SHARD_NAMES[0]


def _truncate(directory: Path) -> str:
    shard = directory / SHARD_NAMES[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    return SHARD_NAMES[1]


def _empty_shard(directory: Path) -> str:
    (directory / SHARD_NAMES[1]).write_bytes(b"")
    return SHARD_NAMES[1]


def _lose_a_shard(directory: Path) -> str:
    (directory / SHARD_NAMES[1]).unlink()
    return SHARD_NAMES[1]


def _break_the_index(directory: Path) -> str:
    (directory / INDEX_NAME).write_text("{")
    return INDEX_NAME


def _no_checkpoint(directory: Path) -> str:
    for file in directory.iterdir():
        file.unlink()
    return "config.json"


def _no_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json"


def _no_weights(directory: Path) -> str:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    return "want a safetensors checkpoint"


def _quantised(directory: Path) -> str:
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(fields))
    return "fp8"


def _a_config_that_does_not_fit(directory: Path) -> str:
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 112', '"intermediate_size": 96'))
    return "gate_proj.weight is [112, 64], not [96, 64]"


@pytest.mark.parametrize(
    "damage",
    [
        _corrupt,
        _truncate,
        _empty_shard,
        _lose_a_shard,
        _break_the_index,
        _no_checkpoint,
        _no_tokenizer,
        _no_weights,
        _quantised,
        _a_config_that_does_not_fit,
    ],
)
def test_a_bad_checkpoint_is_one_line_and_exit_code_2(
    damage: Callable[[Path], str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    said = damage(checkpoint)
    assert main(["generate", str(checkpoint), "--prompt", "a"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = error_line(printed.err)
    assert line.startswith("qwen35 generate: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "hello world " * 9, "--max-model-len", "8"], "context holds 8"),
        (["--prompt", "a\udcff"], "lone surrogate"),
        (["--prompt", "a", "--max-model-len", "8193"], "max_model_len 8193"),
    ],
    ids=["empty", "over_the_context", "not_unicode", "context_over_the_checkpoints"],
)
def test_a_prompt_that_cannot_run_is_one_line_and_exit_code_2(
    argv: list[str], said: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", str(checkpoint), *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in error_line(printed.err)


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch):
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen35_jax.generate.main", interrupt)
    assert main(["generate"]) == 130


def test_everything_after_the_command_is_the_commands(monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []

    def record(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr("qwen35_jax.generate.main", record)
    argv = ["model", "--version", "--prompt", "-x", "--", "rest"]
    assert main(["generate", *argv]) == 7
    assert seen == [argv]


def start(*argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "qwen35_jax.cli", *argv],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_process_exits_with_the_code_and_one_line():
    with start("generate", "./no/such/directory", "--prompt", "a") as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == b""
    expected = "qwen35 generate: error: directory ./no/such/directory does not exist"
    assert errors.decode().splitlines() == [expected]


def test_a_reader_that_leaves_is_no_traceback(checkpoint: Path):
    flags = ["--prompt", "hello", "--ignore-eos", "--max-tokens", "200"]
    with start("generate", str(checkpoint), *flags) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def run_generate(redirection: str) -> subprocess.CompletedProcess[str]:
    """`qwen35 generate` behind a shell that closes or breaks one of its streams."""
    command = f'exec "{sys.executable}" -m qwen35_jax.cli generate --max-tokens 3 {redirection}'
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("<&-", 2, "stdin is closed: give --prompt"),
        ("--prompt a >/dev/full", 1, "No space left on device"),
        ("--prompt a --model /no/such 2>&-", 2, ""),
    ],
)
def test_closed_or_full_streams_give_no_traceback(redirection: str, code: int, message: str):
    finished = run_generate(redirection)
    assert finished.returncode == code
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
