"""The command: its flags, what the user gets wrong, and what stops it before it serves."""

import json
import shlex
import signal
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.default_model import default_model_directory
from qwen35_jax.model_files import ModelFiles, find_model
from serve.__main__ import Server, main, make_parser
from tests.support.checkpoints import write_config
from tests.support.engines import two_layer_config
from tests.support.tiny_tokenizer import write_tiny_tokenizer

FACTORIES = "tests.support.process_engines"
# An engine's process that starts, which nothing here should, would fail in another way.
NEVER = "nowhere:load"


@pytest.fixture(autouse=True)
def _no_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of main in this process must not change where other tests' messages go."""
    monkeypatch.setattr("serve.__main__.log_to_terminal", lambda: None)


def write_model_without_weights(directory: Path) -> None:
    config = two_layer_config()
    config["text_config"] |= {"vocab_size": 384}
    write_config(directory, config)
    write_tiny_tokenizer(directory)


def test_a_busy_port_is_one_line_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["nowhere/at/all", "--port", str(port)], factory=NEVER) == 2
    assert capsys.readouterr().err == (
        f"qwen35 serve: error: can't listen on 127.0.0.1 port {port}: Address already in use; "
        "choose another with --host and --port\n"
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "65536"], "--port"),
        (["--max-model-len", "0"], "max_model_len"),
        (["--max-num-seqs", "-1"], "max_num_seqs"),
        (["--served-model-name", ""], "served_model_name must not be empty"),
        (["--served-model-name", "a\udcff"], r"'a\udcff' is not UTF-8"),
        (["--stuck-after-seconds", "0"], "stuck_after_seconds must be a positive number, not 0"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization is a share"),
        (["--host", "256.0.0.1", "--port", "0"], "256.0.0.1"),
        (["--host", "x" * 70 + ".invalid", "--port", "0"], "invalid"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], named: str):
    assert main(flags, factory=NEVER) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("qwen35 serve: error: ")
    assert errors.count("\n") == 1
    assert named in errors


def test_a_model_that_cannot_be_found_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main([str(tmp_path), "--port", "0"], factory=NEVER) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert str(tmp_path) in errors


def test_a_users_mistake_that_the_engines_process_finds_is_one_line(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["--port", "0"], factory=f"{FACTORIES}:refuse_checkpoint") == 2
    assert capsys.readouterr().err == (
        "qwen35 serve: error: model.safetensors is truncated; fetch it again\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_server_runs_exits_with_0_and_gives_the_handlers_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    def interrupted(config: EngineConfig) -> ModelFiles:
        signal.raise_signal(number)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr("serve.__main__.find_model", interrupted)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["--port", "0"], factory=NEVER) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert capsys.readouterr().err == ""


def test_a_signal_that_a_callback_swallows_still_stops(monkeypatch: pytest.MonkeyPatch):
    """As happens in callbacks of the garbage collector."""

    def find(config: EngineConfig) -> ModelFiles:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return find_model(config)

    def run(self: Server, sockets: list[socket.socket]) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr("serve.__main__.find_model", find)
    monkeypatch.setattr("serve.__main__.Server.run", run)
    assert main(["--port", "0"], factory=f"{FACTORIES}:load") == 0


ENGINE_FLAGS = (
    "--max-model-len 64 --max-num-seqs 3 --dtype float32 --load-format dummy --seed 7 "
    "--numerics transformers --max-num-batched-tokens 317 --gpu-memory-utilization 0.5 "
    "--kv-cache-tokens 1000 --block-size 16 --compilation-cache-dir none --strict-compilation"
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        (
            ENGINE_FLAGS,
            {
                "max_model_len": 64,
                "max_num_seqs": 3,
                "dtype": "float32",
                "load_format": "dummy",
                "seed": 7,
                "numerics": "transformers",
                "max_num_batched_tokens": 317,
                "gpu_memory_utilization": 0.5,
                "kv_cache_tokens": 1000,
                "block_size": 16,
                "compilation_cache_dir": "none",
                "strict_compilation": True,
            },
        ),
    ],
)
def test_flags_reach_the_engines_process(
    flags: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    assert main([*shlex.split(flags), "--port", "0"], factory=f"{FACTORIES}:tell_config") == 2
    told = json.loads(capsys.readouterr().err.removeprefix("qwen35 serve: error: "))
    # The model is found once, here.
    assert told == asdict(EngineConfig()) | {"model": str(default_model_directory())} | expected
    if expected:
        assert set(told) == {"model", *expected}, "a field of EngineConfig has no flag"


@pytest.mark.parametrize("flags", [["{}"], ["--model", "{}"]])
def test_the_model_is_what_is_named(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_model_without_weights(tmp_path)
    flags = [flag.format(tmp_path) for flag in flags]
    assert main([*flags, "--port", "0"], factory=f"{FACTORIES}:tell_config") == 2
    told = json.loads(capsys.readouterr().err.removeprefix("qwen35 serve: error: "))
    assert told["model"] == str(tmp_path)


def test_the_servers_own_flags_take_effect(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}

    def run(self: Server, sockets: list[socket.socket]) -> None:
        seen["address"] = sockets[0].getsockname()
        seen["message"] = self._ready_message
        seen["stuck_after_seconds"] = self._client._engine.stuck_after_seconds

    monkeypatch.setattr("serve.__main__.Server.run", run)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
    flags = f"--host 127.0.0.2 --port {port} --served-model-name mine --stuck-after-seconds 2.5"
    assert main(shlex.split(flags), factory=f"{FACTORIES}:load") == 0
    assert seen["address"] == ("127.0.0.2", port)
    assert f"Ready: mine at http://127.0.0.2:{port}\n" in seen["message"]
    assert seen["stuck_after_seconds"] == 2.5
    assert main(["--port", "0"], factory=f"{FACTORIES}:load") == 0
    assert seen["stuck_after_seconds"] == 60
    assert "Ready: qwen3.5-tiny at http://127.0.0.1:" in seen["message"]


def test_a_dry_run_prints_the_plan_without_weights_or_a_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_model_without_weights(tmp_path)
    flags = f"{tmp_path} --dry-run --max-num-seqs 3 --max-model-len 64 --kv-cache-tokens 1000"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*shlex.split(flags), "--port", str(port)], factory=NEVER) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Memory plan")
    assert "\n3 sequences at once, each of up to 64 tokens; KV for 1,024 tokens" in printed


def test_the_model_may_be_given_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["one", "--model", "two"], factory=NEVER)
    assert ended.value.code == 2
    assert "give the model once" in capsys.readouterr().err


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.count("(default:") == 16
    for action in make_parser()._actions:
        assert action.help, action.dest
