"""The app over a fake engine, as a client sees it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.types import Message

from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import EngineThread
from qwen35_jax.tokenizer import Tokenizer
from serve.app import create_app
from serve.config import ServeConfig
from serve.engine_client import EngineClient
from tests.support.tiny_tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID, VOCABULARY_SIZE

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 100
WAIT_SECONDS = 10


@dataclass(frozen=True)
class Served:
    app: Starlette
    http: httpx.AsyncClient
    client: EngineClient
    thread: EngineThread


class TestEngine(FakeEngine):
    """A FakeEngine for the tiny tokenizer that says `ids`, or hashes of the prompt.

    fails_at_step: the step that raises, counted from 1. submitted: every request it was given.
    steps: how many it made.
    """

    __test__ = False

    def __init__(
        self,
        *,
        ids: Sequence[int] | None = None,
        fails_at_step: int | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        **options: Any,
    ):
        super().__init__(
            vocabulary_size=VOCABULARY_SIZE,
            script=None if ids is None else lambda prompt: ids,
            eos_token_ids=(END_OF_TEXT_ID, END_OF_TURN_ID),
            max_model_len=max_model_len,
            **options,
        )
        self.submitted: list[Request] = []
        self._fails_at_step = fails_at_step
        self.steps = 0

    def submit(self, request: Request) -> None:
        self.submitted.append(request)
        super().submit(request)

    def step(self) -> list[TokenOutput]:
        self.steps += 1
        if self.steps == self._fails_at_step:
            raise RuntimeError("the device is gone")
        return super().step()


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, engine: TestEngine | None = None, **config: Any
) -> AsyncIterator[Served]:
    with EngineThread(engine or TestEngine()) as thread:
        client = EngineClient(thread)
        app = create_app(
            config=ServeConfig(served_model_name=MODEL_NAME, **config),
            client=client,
            tokenizer=tokenizer,
            max_model_len=MAX_MODEL_LEN,
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Served(app, http, client, thread)


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WAIT_SECONDS):
            return await coroutine

    return asyncio.run(bounded())


def request(
    tokenizer: Tokenizer,
    method: str,
    path: str,
    engine: TestEngine | None = None,
    **options: Any,
) -> httpx.Response:
    """One request to an app of its own."""

    async def send() -> httpx.Response:
        async with serving(tokenizer, engine) as served:
            return await served.http.request(method, path, **options)

    return run(send())


def complete(
    tokenizer: Tokenizer, engine: TestEngine | None = None, **fields: Any
) -> httpx.Response:
    """POST /v1/completions with `fields` as the body."""
    return request(tokenizer, "POST", "/v1/completions", engine, json=fields)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, which has exactly the four fields."""
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


def events_of(text: str) -> list[Any]:
    """The JSON of every event of a stream; "[DONE]" as it is."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [block if block == "[DONE]" else json.loads(block) for block in data]


@dataclass
class RawExchange:
    """One request at the ASGI level: what is sent when, and a client that can leave."""

    app: Starlette
    body: dict[str, Any]

    def __post_init__(self) -> None:
        self.sent: list[Message] = []
        self._left = asyncio.Event()
        self._changed = asyncio.Condition()
        self._body: list[bytes] = [json.dumps(self.body).encode()]

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        async with self._changed:
            self.sent.append(dict(message))
            self._changed.notify_all()

    async def wait_for_messages(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.sent) >= count)

    def leave(self) -> None:
        self._left.set()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)
