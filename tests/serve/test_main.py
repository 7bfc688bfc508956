"""The command: flags, a real server process, signals, and what the user gets wrong."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.thread import EngineThread
from qwen35_jax.tokenizer import Tokenizer
from serve.__main__ import LoadedEngine, Server, main, make_parser
from serve.app import create_app
from serve.config import ServeConfig
from serve.engine_client import EngineClient
from tests.serve.harness import WAIT_SECONDS, TestEngine, events_of
from tests.support.tiny_tokenizer import write_tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]
LONG_CONTEXT = 100_000


@pytest.fixture(autouse=True)
def _no_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of main in this process must not change where other tests' messages go."""
    monkeypatch.setattr("serve.__main__.log_to_terminal", lambda: None)


STOPPING = "Stopping: running requests have 10 s to end; stop again to end them now\n"


def never_load(config: EngineConfig) -> LoadedEngine:
    raise AssertionError("nothing should be loaded")


@contextmanager
def server_process(
    directory: Path, *, seconds_per_step: float = 0.005
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and the curl line that it printed."""
    write_tiny_tokenizer(directory)
    program = ["-m", "tests.serve.fake_server", str(directory), str(seconds_per_step)]
    with subprocess.Popen(
        [sys.executable, *program, "--port", "0"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[0] == "fake engine, no model\n"
            assert re.fullmatch(r"Ready: fake at http://127\.0\.0\.1:\d+\n", lines[1]), lines
            yield process, lines[2]
        finally:
            process.kill()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=WAIT_SECONDS + 10)
    return process.returncode, errors


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def server_thread(
    tokenizer: Tokenizer, engine: TestEngine, *, drain_seconds: float
) -> Iterator[tuple[Server, EngineThread, str]]:
    """A real server in this process, stopped at the end, and its URL."""
    with EngineThread(engine) as thread, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        config = ServeConfig(served_model_name="tiny", drain_seconds=drain_seconds)
        client = EngineClient(thread)
        app = create_app(
            config=config, client=client, tokenizer=tokenizer, max_model_len=LONG_CONTEXT
        )
        server = Server(app, config, client, ready_message="ready")
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.start()
        try:
            yield server, thread, url
        finally:
            server.should_exit = True
            running.join(WAIT_SECONDS)
        assert not running.is_alive()


@contextmanager
def raw_connection(url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection that has sent a completion request and read nothing yet."""
    content = json.dumps(body).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content)
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_SECONDS)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(head + content)
        yield connection


def test_a_real_server_streams_and_notices_clients_that_leave(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1], seconds_per_step=0.005, max_model_len=LONG_CONTEXT)
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    with (
        server_thread(tokenizer, engine, drain_seconds=0.2) as (_, thread, url),
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http,
    ):
        short = http.post("/v1/completions", json={**body, "max_tokens": 3})
        assert len(events_of(short.text)) == 4
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_text()).startswith("data: ")
            assert thread.in_flight == 1
        wait_until(lambda: thread.in_flight == engine.running_count == 0)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**body, "stream": False}, timeout=0.1)
        wait_until(lambda: thread.in_flight == engine.running_count == 0)
        assert http.get("/health").status_code == 200


def test_a_real_server_sends_one_event_a_write(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1], seconds_per_step=0.02)
    body = {"prompt": "a", "max_tokens": 4, "stream": True}
    with (
        server_thread(tokenizer, engine, drain_seconds=0.2) as (_, _, url),
        raw_connection(url, body) as connection,
    ):
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    headers, _, chunked = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200")
    chunks = re.findall(rb"[0-9a-f]+\r\n(.*?)\r\n(?=[0-9a-f]+\r\n)", chunked, re.DOTALL)
    assert [chunk[:6] for chunk in chunks] == [b"data: "] * 5
    assert [chunk.count(b"\n\n") for chunk in chunks] == [1] * 5


def test_streams_end_when_the_drain_time_is_over(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1], seconds_per_step=0.005, max_model_len=LONG_CONTEXT)
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    with (
        server_thread(tokenizer, engine, drain_seconds=0.3) as (server, _, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        pieces = response.iter_text()
        text = next(pieces)
        server.should_exit = True
        text += "".join(pieces)
    assert events_of(text)[-2]["choices"][0]["finish_reason"] == "abort"


def test_a_client_that_does_not_read_cannot_keep_the_server_from_stopping(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    engine = TestEngine(ids=[1], max_model_len=LONG_CONTEXT)
    body = {"prompt": ["a"] * 16, "max_tokens": 90_000, "stream": True}
    with (
        server_thread(tokenizer, engine, drain_seconds=0) as (server, thread, url),
        raw_connection(url, body) as connection,
    ):
        assert connection.recv(12) == b"HTTP/1.1 200"
        # Long enough for the small buffers between the two to fill up.
        time.sleep(0.5)
        assert server.server_state.tasks
        server.should_exit = True
        wait_until(lambda: not server.server_state.connections)
        wait_until(lambda: thread.in_flight == 0)
    assert caplog.text == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_short_stream_end_and_exits_with_0(tmp_path: Path, number: signal.Signals):
    with server_process(tmp_path) as (process, curl_line):
        body = {"prompt": "a", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", shlex.split(curl_line)[2], json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            process.send_signal(number)
            text += "".join(pieces)
        *_, last, done = events_of(text)
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert end_of(process) == (0, STOPPING)


def test_a_second_signal_ends_long_streams_at_once(tmp_path: Path):
    with server_process(tmp_path) as (process, curl_line):
        body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
        with httpx.stream("POST", shlex.split(curl_line)[2], json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        *_, last, done = events_of(text)
        assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        assert end_of(process) == (0, STOPPING)
        assert time.monotonic() - started < 5


def test_a_signal_stops_a_server_whose_stderr_nobody_reads(tmp_path: Path):
    with server_process(tmp_path) as (process, curl_line):
        body = {"prompt": "a", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", shlex.split(curl_line)[2], json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            assert process.stderr is not None
            process.stderr.close()
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert events_of(text)[-1] == "[DONE]"
        assert process.wait(WAIT_SECONDS + 10) == 0


def test_the_curl_line_works(tmp_path: Path):
    with server_process(tmp_path) as (process, curl_line):
        _, _, url, _, header, _, body = shlex.split(curl_line)
        headers = dict([header.split(": ")])
        response = httpx.post(url, content=body, headers=headers)
        assert 0 < response.json()["usage"]["completion_tokens"] <= 64
        process.send_signal(signal.SIGINT)
        assert end_of(process) == (0, "")


def test_a_busy_port_is_one_line_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)], load=never_load) == 2
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
        (["--host", "256.0.0.1", "--port", "0"], "256.0.0.1"),
        (["--host", "x" * 70 + ".invalid", "--port", "0"], "invalid"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], named: str):
    assert main(flags, load=never_load) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("qwen35 serve: error: ")
    assert errors.count("\n") == 1
    assert named in errors


def test_a_model_that_cannot_be_loaded_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def load(config: EngineConfig) -> LoadedEngine:
        Tokenizer.from_directory(config.model or "")
        raise AssertionError("there is no tokenizer")

    assert main([str(tmp_path), "--port", "0"], load=load) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert str(tmp_path) in errors


def test_a_signal_while_loading_exits_with_0_and_gives_the_handlers_back(
    capsys: pytest.CaptureFixture[str],
):
    def load(config: EngineConfig) -> LoadedEngine:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was lost")

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["--port", "0"], load=load) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert capsys.readouterr().err == ""


def test_a_signal_that_a_callback_swallows_while_loading_still_stops():
    """As jax does in its callbacks of the garbage collector."""

    def load(config: EngineConfig) -> LoadedEngine:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return cast(LoadedEngine, None)

    assert main(["--port", "0"], load=load) == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], EngineConfig()),
        (["some/model"], EngineConfig(model="some/model")),
        (["--model", "some/model"], EngineConfig(model="some/model")),
        (
            shlex.split(
                "--max-model-len 64 --max-num-seqs 3 --dtype float32 --load-format dummy "
                "--seed 7 --numerics transformers"
            ),
            EngineConfig(
                max_model_len=64,
                max_num_seqs=3,
                dtype="float32",
                load_format="dummy",
                seed=7,
                numerics="transformers",
            ),
        ),
    ],
)
def test_flags_reach_the_loader(flags: list[str], expected: EngineConfig):
    seen: list[EngineConfig] = []

    def load(config: EngineConfig) -> LoadedEngine:
        seen.append(config)
        raise KeyboardInterrupt

    assert main([*flags, "--port", "0"], load=load) == 0
    assert seen == [expected]


def test_the_model_may_be_given_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["one", "--model", "two"], load=never_load)
    assert ended.value.code == 2
    assert "give the model once" in capsys.readouterr().err


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.count("(default:") == 10
