"""`qwen35 serve` as the operating system sees it: signals, deaths, exit codes, what is left."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.harness import WAIT_SECONDS, error_of, events_of
from tests.support import process_engines
from tests.support.processes import children_of, is_alive, wait_until

REPOSITORY = Path(__file__).parents[2]
FACTORIES = "tests.support.process_engines"
REAL_FACTORY = "qwen35_jax.loading:load_engine"
START_SECONDS = 120

STOPPING = "Stopping: running requests have 10 s to end; stop again to end them now\n"
ADVICE = (
    "the server has stopped. Start it again; should that fail too, the lines above and the "
    "kernel's log (was memory short?) say more\n"
)
ENDLESS = {"prompt": [1], "max_tokens": 90_000}


@dataclass(frozen=True)
class Running:
    """curl_line: what the server printed to try it with."""

    process: subprocess.Popen[str]
    curl_line: str

    @property
    def url(self) -> str:
        return shlex.split(self.curl_line)[2]

    @property
    def health_url(self) -> str:
        return self.url.replace("/v1/completions", "/health")

    def engine_process_id(self) -> int:
        (child,) = children_of(self.process.pid)
        return child

    def end(self) -> tuple[int, str]:
        """The exit code and what came on stderr, less what every start says."""
        _, errors = self.process.communicate(timeout=WAIT_SECONDS + 10)
        first, rest = errors.split("\n", 1)
        assert first.startswith("No model is named")
        return self.process.returncode, rest


@contextmanager
def started(factory: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Without what it says of the load on stderr: the factories log one line, or none."""
    program = ["-m", "tests.serve.server_program", factory, "--port", "0", *flags]
    with subprocess.Popen(
        [sys.executable, *program],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def server_process(factory: str = "load_long", *flags: str) -> Iterator[Running]:
    """A server that is ready, on a fake engine, and whose engine's process does not outlive it."""
    with started(f"{FACTORIES}:{factory}", *flags) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0] == "qwen3.5-tiny: fake engine, no model\n"
        assert re.fullmatch(r"Ready: qwen3.5-tiny at http://127\.0\.0\.1:\d+\n", lines[1]), lines
        running = Running(process, lines[2])
        engine = running.engine_process_id()
        yield running
        process.kill()
        wait_until(lambda: not is_alive(engine))


@contextmanager
def streaming(running: Running, **fields: Any) -> Iterator[tuple[str, Iterator[str]]]:
    """The text of a stream that has begun, and its further pieces."""
    body = ENDLESS | {"stream": True} | fields
    with httpx.stream("POST", running.url, json=body, timeout=WAIT_SECONDS) as response:
        pieces = response.iter_text()
        yield next(pieces), pieces


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_short_stream_end_and_exits_with_0(number: signal.Signals):
    with server_process() as running:
        with streaming(running, max_tokens=60) as (text, pieces):
            running.process.send_signal(number)
            text += "".join(pieces)
        *_, last, done = events_of(text)
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert running.end() == (0, STOPPING)


def test_a_signal_to_the_engines_process_too_changes_nothing():
    """As a terminal and a service manager send it."""
    with server_process() as running:
        with streaming(running, max_tokens=60) as (text, pieces):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(running.engine_process_id(), number)
            running.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert events_of(text)[-2]["choices"][0]["finish_reason"] == "length"
        assert running.end() == (0, STOPPING)


def test_a_second_signal_ends_long_streams_at_once():
    with server_process() as running:
        with streaming(running) as (text, pieces):
            started_at = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            running.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        *_, last, done = events_of(text)
        assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        assert running.end() == (0, STOPPING)
        assert time.monotonic() - started_at < 5


def test_a_signal_stops_a_server_whose_stderr_nobody_reads():
    with server_process() as running:
        with streaming(running, max_tokens=60) as (text, pieces):
            assert running.process.stderr is not None
            running.process.stderr.close()
            running.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert events_of(text)[-1] == "[DONE]"
        assert running.process.wait(WAIT_SECONDS + 10) == 0


def test_the_curl_line_works():
    with server_process() as running:
        _, _, url, _, header, _, body = shlex.split(running.curl_line)
        headers = dict([header.split(": ")])
        response = httpx.post(url, content=body, headers=headers)
        assert 0 < response.json()["usage"]["completion_tokens"] <= 64
        running.process.send_signal(signal.SIGINT)
        assert running.end() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_exits_with_0_and_leaves_no_process(number: signal.Signals):
    with started(f"{FACTORIES}:load_for_ever") as process:
        assert process.stderr is not None
        process.stderr.readline()
        engine = int(process.stderr.readline().removeprefix("loading for ever in "))
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, errors) == (0, "")
        assert not is_alive(engine)


def test_a_service_managers_signal_to_both_while_loading_exits_with_0():
    with started(f"{FACTORIES}:load_for_ever") as process:
        assert process.stderr is not None
        process.stderr.readline()
        engine = int(process.stderr.readline().removeprefix("loading for ever in "))
        process.send_signal(signal.SIGSTOP)
        os.kill(engine, signal.SIGTERM)
        wait_until(lambda: not is_alive(engine))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, errors) == (0, "")


def test_a_killed_engine_ends_its_requests_and_the_server_with_1():
    killed = "the engine process was killed by signal 9 (Killed)"
    whole: list[httpx.Response] = []

    def ask(url: str) -> None:
        whole.append(httpx.post(url, json=ENDLESS, timeout=WAIT_SECONDS))

    with server_process() as running:
        asking = threading.Thread(target=ask, args=(running.url,))
        asking.start()
        with streaming(running) as (text, pieces):
            time.sleep(0.1)
            os.kill(running.engine_process_id(), signal.SIGKILL)
            text += "".join(pieces)
        asking.join()
        error = {"message": killed, "type": "server_error", "param": None, "code": "engine_error"}
        assert events_of(text)[-1] == {"error": error}
        assert (whole[0].status_code, error_of(whole[0])) == (500, error)
        assert running.end() == (
            1,
            f"{killed}; it takes no more requests\nqwen35 serve: error: {killed}; {ADVICE}",
        )


def test_an_engine_that_ends_by_itself_ends_the_server_with_1():
    with server_process("load") as running:
        body = {"prompt": [process_engines.EXIT], "max_tokens": 4}
        response = httpx.post(running.url, json=body)
        ended = f"the engine process ended with exit code {process_engines.EXIT_CODE}"
        # 503 where the process was gone before it could say that it had taken the request.
        assert response.status_code in (500, 503)
        assert error_of(response)["message"] == ended
        exit_code, errors = running.end()
        assert exit_code == 1
        assert errors.endswith(f"qwen35 serve: error: {ended}; {ADVICE}")


def test_an_engine_whose_step_raises_ends_the_server_with_1_and_tells_where():
    with server_process("load") as running:
        body = {"prompt": [process_engines.RAISE], "max_tokens": 4}
        response = httpx.post(running.url, json=body)
        failed = "the engine failed: RuntimeError: out of memory"
        assert (response.status_code, error_of(response)["message"]) == (500, failed)
        exit_code, errors = running.end()
        assert exit_code == 1
        assert 'raise RuntimeError("out of memory' in errors
        assert errors.endswith(f"qwen35 serve: error: {failed}; {ADVICE}")


def test_an_engine_that_dies_while_loading_is_one_line_and_exit_code_1():
    with started(f"{FACTORIES}:die") as process:
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert errors.endswith(
        "\nqwen35 serve: error: the engine process was killed by signal 11 (Segmentation fault); "
        + ADVICE
    )
    assert errors.count("\n") == 2


def test_health_is_503_when_the_engine_is_stuck_and_a_signal_still_stops_the_server():
    with server_process("load", "--stuck-after-seconds", "0.5") as running:
        assert httpx.get(running.health_url).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": [process_engines.HANG], "max_tokens": 4}
            httpx.post(running.url, json=body, timeout=0.1)

        def is_stuck() -> bool:
            return httpx.get(running.health_url).status_code == 503

        wait_until(is_stuck)
        error = error_of(httpx.get(running.health_url))
        assert error["code"] == "engine_unavailable"
        assert re.fullmatch(
            r"the engine is stuck: requests wait, and no step has ended for \d+\.\d s",
            error["message"],
        )
        engine = running.engine_process_id()
        running.process.send_signal(signal.SIGTERM)
        exit_code, errors = running.end()
        assert exit_code == 0
        assert errors.count("the engine is stuck") == 1
        assert not is_alive(engine)


@pytest.mark.parametrize("state", ["idle", "stepping", "loading"])
def test_the_engine_ends_with_a_server_that_is_killed(state: str):
    if state == "loading":
        with started(f"{FACTORIES}:load_for_ever") as process:
            assert process.stderr is not None
            process.stderr.readline()
            engine = int(process.stderr.readline().removeprefix("loading for ever in "))
            process.kill()
            wait_until(lambda: not is_alive(engine))
        return
    with server_process() as running:
        engine = running.engine_process_id()
        if state == "stepping":
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(running.url, json=ENDLESS, timeout=0.1)
        running.process.kill()
        wait_until(lambda: not is_alive(engine))


def test_the_real_engine_answers_a_server_without_jax(monkeypatch: pytest.MonkeyPatch):
    # Compiling takes most of the time.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    flags = shlex.split(
        "--max-model-len 64 --max-num-seqs 1 --max-num-batched-tokens 65 --kv-cache-tokens 64 "
        "--strict-compilation"
    )
    with started(REAL_FACTORY, *flags) as process:
        assert process.stdout is not None
        description, ready, curl_line = (process.stdout.readline() for _ in range(3))
        assert description.startswith("qwen3.5-tiny: 5,0"), process.communicate()
        assert ready.startswith("Ready: qwen3.5-tiny at ")
        body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
        response = httpx.post(shlex.split(curl_line)[2], json=body, timeout=START_SECONDS)
        assert response.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, errors
    # From the engine's process, by way of this one's log, and straight to the same terminal.
    assert "\n1 sequences at once, each of up to 64 tokens; KV for 64 tokens" in errors
    assert "Compiling: 100%" in errors
    assert re.search(r"Compiled \d+ programs", errors)
