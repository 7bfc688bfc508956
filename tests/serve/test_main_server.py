"""The HTTP server itself, in this process, on engines that it is given."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from qwen35_jax.engine.request import TokenOutput
from qwen35_jax.engine.thread import EngineThread
from qwen35_jax.tokenizer import Tokenizer
from serve.__main__ import Server
from serve.app import create_app
from serve.config import ServeConfig
from serve.engine_client import EngineClient
from tests.serve.harness import WAIT_SECONDS, TestEngine, error_of, events_of
from tests.support.processes import wait_until

LONG_CONTEXT = 100_000


@contextmanager
def server_thread(
    tokenizer: Tokenizer, engine: TestEngine, *, drain_seconds: float = 0.2, **options: Any
) -> Iterator[tuple[Server, EngineThread, str]]:
    """A real server in this process, stopped at the end, and its URL."""
    with (
        EngineThread(engine, **options) as thread,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
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


def test_a_failed_engine_ends_open_requests_and_the_server(tokenizer: Tokenizer):
    engine = TestEngine(
        ids=[1], seconds_per_step=0.01, fails_at_step=10, max_model_len=LONG_CONTEXT
    )
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    with server_thread(tokenizer, engine, drain_seconds=60) as (server, thread, url):
        events = events_of(httpx.post(f"{url}/v1/completions", json=body).text)
        assert (
            events[-1]["error"]["message"] == "the engine failed: RuntimeError: the device is gone"
        )
        wait_until(lambda: server.should_exit)
        assert thread.failure is not None


def test_a_stuck_engine_is_a_503_until_it_goes_on_and_two_lines_in_the_log(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    release = threading.Event()

    class GatedEngine(TestEngine):
        def step(self) -> list[TokenOutput]:
            assert release.wait(WAIT_SECONDS)
            return super().step()

    body = {"prompt": "a", "max_tokens": 2}
    with server_thread(tokenizer, GatedEngine(), stuck_after_seconds=0.3) as (_, _, url):
        assert httpx.get(f"{url}/health").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.05)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        error = error_of(httpx.get(f"{url}/health"))
        assert error["message"].startswith("the engine is stuck: requests wait")
        wait_until(lambda: caplog.messages)
        release.set()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        wait_until(lambda: len(caplog.messages) == 2)
    stuck, goes_on = caplog.messages
    assert stuck.startswith("the engine is stuck") and "/health answers 503" in stuck
    assert goes_on == "the engine goes on; /health is as before"
