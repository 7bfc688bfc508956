"""One engine for all callers in a process: whoever waits for an output steps it. No jax here.

Requests of several threads and tasks run in the same batches. A step belongs to nobody: its outputs
go to the inboxes of the requests that they are of.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from qwen35_jax.engine.request import Engine, Request, TokenOutput
from qwen35_jax.engine.stats import EngineStats
from qwen35_jax.errors import ConfigError, InvalidRequestError


class SharedEngine:
    """All access to `engine` once this is made."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = threading.Lock()
        self._inboxes: dict[str, Inbox] = {}
        self._is_closed = False
        # Waiting for a thread that has the lock. The garbage collector may close an inbox anywhere,
        # in the middle of a step too.
        self._unwanted: deque[str] = deque()
        # The step that a loop's tasks are waiting for.
        self._steps: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[None]] = (
            WeakKeyDictionary()
        )

    def inbox(self) -> "Inbox":
        return Inbox(self)

    def stats(self) -> EngineStats:
        with self._lock:
            return self._engine.stats()

    def close(self) -> None:
        """End what is open as "abort" and close the engine, once a step that runs has ended. Later
        submits raise ConfigError. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for request_id, inbox in self._inboxes.items():
                inbox.outputs.append(TokenOutput(request_id, finish_reason="abort"))
            self._inboxes.clear()
            self._engine.close()

    def _submit(self, request: Request, inbox: "Inbox") -> None:
        with self._lock:
            if self._is_closed:
                raise ConfigError("this LLM is closed; make a new one")
            self._abort_unwanted()
            # A task may be cancelled while its thread waits here, which nothing cancels.
            if inbox.is_left:
                return
            # First, so that an interrupt leaves nothing that nobody aborts.
            self._inboxes[request.request_id] = inbox
            try:
                self._engine.submit(request)
            except InvalidRequestError:
                del self._inboxes[request.request_id]
                raise

    def _abort(self, request_ids: Iterable[str]) -> None:
        self._unwanted.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_unwanted()
            finally:
                self._lock.release()

    def _abort_unwanted(self) -> None:
        while self._unwanted:
            request_id = self._unwanted.popleft()
            if self._inboxes.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _step(self, waiting: "Inbox | None" = None) -> None:
        """One step, unless there is no work, or `waiting` has outputs by now."""
        with self._lock:
            self._abort_unwanted()
            if self._is_closed or (waiting is not None and waiting.outputs):
                return
            if not self._engine.has_work():
                # Whatever is still open would wait for ever.
                self._inboxes.clear()
                return
            for output in self._engine.step():
                inbox = self._inboxes.get(output.request_id)
                if inbox is None:
                    continue
                inbox.outputs.append(output)
                if output.finish_reason is not None:
                    del self._inboxes[output.request_id]

    async def _step_with_others(self) -> None:
        """One step in another thread, the same for all tasks of the loop that wait now."""
        loop = asyncio.get_running_loop()
        step = self._steps.get(loop)
        if step is None or step.done():
            step = self._steps[loop] = loop.run_in_executor(None, self._step)
        # Who stops waiting must not stop the others' step.
        await asyncio.shield(step)

    def _is_open(self, request_ids: Iterable[str]) -> bool:
        return any(request_id in self._inboxes for request_id in request_ids)


class Inbox:
    """What comes of the requests submitted through it. A context manager: leaving aborts the rest.

    outputs: not taken yet. is_left: what is submitted from then on does not run.
    """

    def __init__(self, engine: SharedEngine):
        self._engine = engine
        self._request_ids: list[str] = []
        self.outputs: deque[TokenOutput] = deque()
        self.is_left = False

    def __enter__(self) -> "Inbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_left = True
        self._engine._abort(self._request_ids)

    def submit(self, request: Request) -> None:
        """Raises InvalidRequestError for one that can never run, ConfigError once all is closed."""
        self._request_ids.append(request.request_id)
        self._engine._submit(request, self)

    def abort(self, request_id: str) -> None:
        """End a request whose outputs are wanted no more."""
        self._engine._abort([request_id])

    def receive(self) -> list[TokenOutput]:
        """Wait for outputs; none when every request has had its last, or the engine lost them."""
        while not self.outputs and self._engine._is_open(self._request_ids):
            self._engine._step(self)
        return self._take()

    async def receive_async(self) -> list[TokenOutput]:
        while not self.outputs and self._engine._is_open(self._request_ids):
            await self._engine._step_with_others()
        return self._take()

    def _take(self) -> list[TokenOutput]:
        return [self.outputs.popleft() for _ in range(len(self.outputs))]
