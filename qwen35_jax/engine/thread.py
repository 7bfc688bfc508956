"""Drives an engine on one thread of its own, so that other threads can submit and abort.

An Engine is not thread-safe: everything that touches it runs here, between two steps.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from qwen35_jax.config_fields import positive_number
from qwen35_jax.engine.request import Engine, FinishReason, Request, TokenOutput
from qwen35_jax.errors import InvalidRequestError

logger = logging.getLogger(__name__)

OutputReceiver = Callable[[TokenOutput], None]

MAX_ERROR_CHARACTERS = 200
# No step of a working engine takes near as long: a chunk of a prompt on a slow CPU takes seconds.
STUCK_AFTER_SECONDS = 60.0


class EngineError(Exception):
    """The engine failed or is closed: it takes no more requests."""


@dataclass(frozen=True)
class _Submission:
    request: Request
    on_output: OutputReceiver
    accepted: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class _Abort:
    request_id: str


class EngineThread:
    """Owns `engine` and the thread that steps it until `close`. Also a context manager.

    stuck_after_seconds: how long work may wait without the end of a step until the engine counts as
        stuck. For who watches `stuck_for`; nothing else comes of it.

    Receivers are called on the engine's thread with every output of their request, the last one
    carrying a finish_reason: they must return at once. One that raises loses its request and
    nothing else.

    When a step raises, every request in flight ends as "error", `failure` says why, and later
    submits raise it.
    """

    def __init__(self, engine: Engine, *, stuck_after_seconds: float = STUCK_AFTER_SECONDS):
        self.stuck_after_seconds = positive_number("stuck_after_seconds", stuck_after_seconds)
        self._engine = engine
        self._changed = threading.Condition()
        self._commands: deque[_Submission | _Abort] = deque()
        self._closing = False
        self._refusal: EngineError | None = None
        self._failure: EngineError | None = None
        self._receivers: dict[str, OutputReceiver] = {}
        self._aborted: set[str] = set()
        # When there was work to begin with, or a step ended; None while there is no work.
        self._last_progress: float | None = None
        # A daemon, so that a forgotten close can't keep the interpreter from ending; atexit then
        # closes it, because a thread that is killed inside XLA can crash the process.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def __enter__(self) -> "EngineThread":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def failure(self) -> EngineError | None:
        """Why the engine stopped by itself; None while it runs and after a plain close."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether requests are taken and stepped."""
        return self._refusal is None and self._thread.is_alive()

    @property
    def in_flight(self) -> int:
        """How many accepted requests have not had their last output yet."""
        return len(self._receivers)

    @property
    def stuck_for(self) -> float:
        """Seconds that work has waited since a step ended last; 0 where there is no work."""
        last_progress = self._last_progress
        return 0.0 if last_progress is None else time.monotonic() - last_progress

    def submit(self, request: Request, on_output: OutputReceiver) -> None:
        """Hand a request over and wait until the engine has taken it.

        Raises InvalidRequestError when the engine refuses it, EngineError when the engine has
        failed or is closed.
        """
        if threading.current_thread() is self._thread:
            if self._refusal is not None:
                raise self._refusal
            self._submit_now(request, on_output)
        else:
            self.submit_soon(request, on_output).result()

    def submit_soon(self, request: Request, on_output: OutputReceiver) -> Future[None]:
        """As `submit`, without the wait: the future completes, or raises, when `submit` would.

        A future that is cancelled in time withdraws the request.
        """
        submission = _Submission(request, on_output)
        with self._changed:
            if self._refusal is not None:
                submission.accepted.set_exception(self._refusal)
            else:
                self._commands.append(submission)
                self._changed.notify()
        return submission.accepted

    def abort(self, request_id: str) -> None:
        """End a request early; its receiver gets "abort". Unknown and finished ids are fine."""
        with self._changed:
            if self._refusal is None:
                self._commands.append(_Abort(request_id))
                self._changed.notify()

    def close(self) -> None:
        """Abort what is in flight, close the engine and join the thread. Fine to call again."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify()
        # Not alive where an interrupt came before it had started.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason: FinishReason = "abort"
        error_text: str | None = None
        try:
            while self._wait_for_work():
                self._run_commands()
                # A request that was aborted may be gone from the engine's own count of work,
                # its last output still to come.
                if self._receivers or self._engine.has_work():
                    self._deliver(self._engine.step())
                    self._last_progress = time.monotonic()
                    if self._receivers and not self._engine.has_work():
                        self._end_forgotten()
        except BaseException as error:
            logger.exception("the engine failed; it takes no more requests")
            self._failure = EngineError(_describe(error))
            self._failure.__cause__ = error
            reason, error_text = "error", str(self._failure)
        self._end(reason, error_text)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (
                self._closing or self._commands or self._receivers or self._engine.has_work()
            ):
                self._last_progress = None
                self._changed.wait()
            if self._last_progress is None:
                self._last_progress = time.monotonic()
            return not self._closing

    def _run_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Abort):
                if command.request_id in self._receivers:
                    self._abort_now(command.request_id)
            elif command.accepted.set_running_or_notify_cancel():
                try:
                    self._submit_now(command.request, command.on_output)
                except Exception as error:
                    command.accepted.set_exception(error)
                else:
                    command.accepted.set_result(None)

    def _submit_now(self, request: Request, on_output: OutputReceiver) -> None:
        if request.request_id in self._receivers:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use by a request that is still running",
                param="request_id",
            )
        self._engine.submit(request)
        self._receivers[request.request_id] = on_output

    def _abort_now(self, request_id: str) -> None:
        self._aborted.add(request_id)
        self._engine.abort(request_id)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            receiver = self._receivers.get(output.request_id)
            if receiver is None:
                continue
            if output.finish_reason is not None:
                del self._receivers[output.request_id]
                self._aborted.discard(output.request_id)
            try:
                receiver(output)
            except Exception:
                logger.exception("the receiver of request %s raised", output.request_id)
                if self._receivers.pop(output.request_id, None) is not None:
                    self._engine.abort(output.request_id)

    def _end_forgotten(self) -> None:
        """Give a last output to requests that an idle engine never ended."""
        for request_id in tuple(self._receivers):
            if request_id in self._aborted:
                output = TokenOutput(request_id, finish_reason="abort")
            else:
                output = TokenOutput(
                    request_id, finish_reason="error", error="the engine dropped the request"
                )
            self._deliver([output])

    def _end(self, reason: FinishReason, error: str | None) -> None:
        with self._changed:
            self._last_progress = None
            self._refusal = self._failure or EngineError("the engine is closed")
            commands = tuple(self._commands)
            self._commands.clear()
        for command in commands:
            if isinstance(command, _Submission) and command.accepted.set_running_or_notify_cancel():
                command.accepted.set_exception(self._refusal)
        while self._receivers:
            request_id, receiver = self._receivers.popitem()
            try:
                receiver(TokenOutput(request_id, finish_reason=reason, error=error))
            except Exception:
                logger.exception("the receiver of request %s raised", request_id)
        try:
            self._engine.close()
        except Exception:
            logger.exception("closing the engine failed")


def _describe(error: BaseException) -> str:
    """One short line: compiler and device errors can be pages long."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    text = f"the engine failed: {type(error).__name__}"
    if first_line:
        text = f"{text}: {first_line}"
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 1] + "…"
