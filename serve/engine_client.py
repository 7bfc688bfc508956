"""The engine as asyncio sees it: submit requests, iterate over their outputs, abort by leaving."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import EngineError, OutputReceiver

OutputQueue = asyncio.Queue[TokenOutput | None]


class EngineDriver(Protocol):
    """What steps an engine beside this thread: an EngineProcess or an EngineThread."""

    stuck_after_seconds: float

    @property
    def failure(self) -> EngineError | None: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def stuck_for(self) -> float: ...
    def submit_soon(self, request: Request, on_output: OutputReceiver) -> Future[None]: ...
    def abort(self, request_id: str) -> None: ...


class Generation:
    """The outputs of some requests as an async iterator that ends with the last of them.

    Whoever has one calls `close` in the end, whatever happened: it aborts what still runs.
    """

    def __init__(self, engine: EngineDriver, live: "set[Generation]", request_ids: Sequence[str]):
        self._engine = engine
        self._live = live
        self._open = set(request_ids)
        self.queue: OutputQueue = asyncio.Queue()
        live.add(self)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> TokenOutput:
        while self._open:
            output = await self.queue.get()
            if output is not None and output.request_id in self._open:
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)
                return output
        raise StopAsyncIteration

    @property
    def is_complete(self) -> bool:
        """Whether every request had its last output, or was dropped or closed."""
        return not self._open

    def drop(self, request_id: str) -> None:
        """Abort one request, whose outputs are wanted no more."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._engine.abort(request_id)

    def abort(self) -> None:
        """Abort what still runs; the iterator gives each its "abort" without waiting for it."""
        for request_id in self._open:
            self._engine.abort(request_id)
            self.queue.put_nowait(TokenOutput(request_id, finish_reason="abort"))

    def close(self) -> None:
        """Abort what still runs and end the iterator, also for a task that waits in it."""
        for request_id in tuple(self._open):
            self.drop(request_id)
        self.queue.put_nowait(None)
        self._live.discard(self)


class EngineClient:
    """Async access to an engine, from one event loop at a time."""

    def __init__(self, engine: EngineDriver):
        self._engine = engine
        self._live: set[Generation] = set()
        self._draining = False
        self._mailbox: _Mailbox | None = None

    @property
    def unavailable_reason(self) -> str | None:
        """Why new requests are refused, or would only wait; None while all is well."""
        if self._engine.failure is not None:
            return str(self._engine.failure)
        if not self._engine.is_running:
            return "the engine is closed"
        return "the server is shutting down" if self._draining else self.stuck_reason

    @property
    def has_failed(self) -> bool:
        """Whether the engine stopped by itself, for good."""
        return self._engine.failure is not None

    @property
    def stuck_reason(self) -> str | None:
        """Why the engine counts as stuck; None while it steps, or has nothing to do."""
        seconds = self._engine.stuck_for
        if seconds < self._engine.stuck_after_seconds:
            return None
        return f"the engine is stuck: requests wait, and no step has ended for {seconds:.1f} s"

    async def generate(self, requests: Sequence[Request]) -> Generation:
        """Submit requests; returns when the engine has taken all of them.

        Raises InvalidRequestError when it refuses one (then none runs), and EngineError when it
        has failed, is closed or drains.
        """
        if self._draining:
            raise EngineError("the server is shutting down")
        generation = Generation(
            self._engine, self._live, [request.request_id for request in requests]
        )
        receive = partial(self._mailbox_here().put, generation.queue)
        accepted = [self._engine.submit_soon(request, receive) for request in requests]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, accepted))
        except BaseException:
            generation.close()
            raise
        return generation

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def abort_all(self) -> None:
        """End every generation with "abort", without waiting for the engine."""
        for generation in tuple(self._live):
            generation.abort()

    def _mailbox_here(self) -> "_Mailbox":
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        return self._mailbox


class _Mailbox:
    """Carries outputs from the engine's thread to a loop, waking it once for a step's worth."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._lock = threading.Lock()
        self._arrived: list[tuple[OutputQueue, TokenOutput]] = []

    def put(self, queue: OutputQueue, output: TokenOutput) -> None:
        with self._lock:
            self._arrived.append((queue, output))
            is_first = len(self._arrived) == 1
        if is_first:
            try:
                self.loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:
                # The loop is closed and with it whoever listened; last outputs of requests that
                # they aborted may still come.
                with self._lock:
                    self._arrived.clear()

    def _hand_out(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for queue, output in arrived:
            queue.put_nowait(output)
