"""Server-sent events, and noticing that a client has left."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.engine_client import Generation
from serve.errors import error_json

logger = logging.getLogger(__name__)

DONE_EVENT = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"


def event(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(message: str, *, code: str | None = None) -> bytes:
    return b"data: " + error_json(500, message, code=code) + b"\n\n"


class EventStream(Response):
    """Sends each event in one write, a comment while there is none, and headers before all.

    Owns `generation`: closes it at the end, or as soon as the client leaves.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        generation: Generation,
        *,
        keep_alive_seconds: float,
    ):
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._generation = generation
        self._keep_alive_seconds = keep_alive_seconds
        self._is_idle = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator's own `finally`, which never runs when it was never started.
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async with (
                aclosing(self._events) as events,
                background(close_on_disconnect(receive, self._generation), self._comment(send)),
            ):
                await self._send_events(events, send)
            await _send_body(send, b"", more_body=False)
        finally:
            self._generation.close()

    async def _send_events(self, events: AsyncIterator[bytes], send: Send) -> None:
        try:
            async for data in events:
                self._is_idle = False
                await _send_body(send, data)
        except Exception:
            logger.exception("a stream failed")
            await _send_body(send, error_event("internal error; the server's log has the details"))

    async def _comment(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_seconds)
            if self._is_idle:
                await _send_body(send, COMMENT)
            self._is_idle = True


async def close_on_disconnect(receive: Receive, generation: Generation) -> None:
    """Close `generation` when the client leaves. The request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the body of the `with`, no longer than it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_body(send: Send, body: bytes, *, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
