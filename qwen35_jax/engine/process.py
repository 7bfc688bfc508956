"""An engine in a process of its own, behind the same surface as EngineThread. No jax here.

The other side is process_main.py. Commands and events go over ZeroMQ sockets in a directory that
only this user can enter. Another socket, the lifeline, carries nothing: its end tells each side
that the other is gone.
"""

import atexit
import logging
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from qwen35_jax.config import EngineConfig
from qwen35_jax.config_fields import positive_number
from qwen35_jax.engine.child_process import ChildProcess
from qwen35_jax.engine.messages import (
    Abort,
    Accepted,
    Event,
    Failed,
    Hello,
    Load,
    Log,
    Ready,
    Refused,
    Step,
    encode_request,
    engine_failure,
    exception_of,
)
from qwen35_jax.engine.request import FinishReason, Request, TokenOutput
from qwen35_jax.engine.thread import STUCK_AFTER_SECONDS, EngineError, OutputReceiver
from qwen35_jax.errors import InvalidRequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Submission:
    request: Request
    on_output: OutputReceiver
    accepted: Future[None] = field(default_factory=Future)


class EngineProcess:
    """Starts the process, waits until its engine is loaded, and drives it until `close`.

    factory: "module:function"; the function takes `config` and returns an engine with what a door
        must know of it (process_main.LoadedEngine). It is imported in the new process only.
    stuck_after_seconds: how long work may wait without the end of a step until the engine counts as
        stuck. For who watches `stuck_for`, and for `close`.
    close_seconds: how long `close` waits for the process before it is killed; not at all for a
        stuck one.

    process_id: the operating system's. model_name, max_model_len, description: as in LoadedEngine.
    Log records of the process come out of the loggers of the same name here.

    Receivers are called on one thread of this object with every output of their request, the last
    one carrying a finish_reason: they must return at once. One that raises loses its request and
    nothing else.

    When a step raises or the process dies, every request in flight ends as "error", `failure` says
    why, and later submits raise it. Also a context manager.

    Raises what the factory raised, if that is one of errors.USER_ERRORS, and EngineError for any
    other failure to start.
    """

    def __init__(
        self,
        factory: str,
        config: EngineConfig,
        *,
        stuck_after_seconds: float = STUCK_AFTER_SECONDS,
        close_seconds: float = 10.0,
    ):
        self.stuck_after_seconds = positive_number("stuck_after_seconds", stuck_after_seconds)
        self._close_seconds = positive_number("close_seconds", close_seconds)
        self._load = Load(
            factory, config, logging.getLogger(__name__.partition(".")[0]).getEffectiveLevel()
        )
        self._lock = threading.Lock()
        self._commands: deque[_Submission | Abort] = deque()
        self._closing = False
        self._refusal: EngineError | None = None
        self._failure: EngineError | None = None
        self._pending: dict[str, _Submission] = {}
        self._receivers: dict[str, OutputReceiver] = {}
        self._last_progress = time.monotonic()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._ready: Future[Ready] = Future()
        # A daemon for the same reasons as EngineThread's. The process is its child: Linux ends it
        # with the thread that started it, which must therefore live as long.
        self._thread = threading.Thread(target=self._run, name="engine client", daemon=True)
        atexit.register(self.close)
        self._thread.start()
        try:
            ready = self._ready.result()
        except BaseException:
            self.close()
            raise
        self.process_id = ready.process_id
        self.model_name = ready.model_name
        self.max_model_len = ready.max_model_len
        self.description = ready.description

    def __enter__(self) -> "EngineProcess":
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
        return time.monotonic() - self._last_progress if self._has_work() else 0.0

    def submit(self, request: Request, on_output: OutputReceiver) -> None:
        """Hand a request over and wait until the engine has taken it. Not for receivers.

        Raises InvalidRequestError when the engine refuses it, EngineError when the engine has
        failed or is closed.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("submit in a receiver would wait for itself: use submit_soon")
        self.submit_soon(request, on_output).result()

    def submit_soon(self, request: Request, on_output: OutputReceiver) -> Future[None]:
        """As `submit`, without the wait: the future completes, or raises, when `submit` would.

        A future that is cancelled in time withdraws the request.
        """
        submission = _Submission(request, on_output)
        with self._lock:
            if self._refusal is not None:
                submission.accepted.set_exception(self._refusal)
            else:
                self._post(submission)
        return submission.accepted

    def abort(self, request_id: str) -> None:
        """End a request early; its receiver gets "abort". Unknown and finished ids are fine."""
        with self._lock:
            if self._refusal is None:
                self._post(Abort(request_id))

    def close(self) -> None:
        """Abort what is in flight, end the process and join the thread. Fine to call again."""
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
            if self._refusal is None:
                self._wake()
        # Not alive where an interrupt came before it had started.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _has_work(self) -> bool:
        return bool(self._receivers or self._pending or self._commands)

    def _post(self, command: _Submission | Abort) -> None:
        if not self._has_work():
            self._last_progress = time.monotonic()
        self._commands.append(command)
        if len(self._commands) == 1:
            self._wake()

    def _wake(self) -> None:
        # Full means that the thread has not even looked at earlier calls.
        with suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        reason: FinishReason = "abort"
        error_text: str | None = None
        child: ChildProcess | None = None
        try:
            child = ChildProcess(self._wakened)
            while not self._closing:
                child.wait()
                for event in child.events():
                    self._take(child, event)
                if child.is_gone:
                    raise EngineError(child.how_it_ended())
                self._send_commands(child)
            self._fail_start(EngineError("the engine is closed"))
        except BaseException as error:
            if not self._fail_start(error):
                self._failure = _as_engine_error(error)
                logger.error("%s; it takes no more requests", self._failure)
                reason, error_text = "error", str(self._failure)
        is_stuck = self.stuck_for >= self.stuck_after_seconds
        self._end(reason, error_text)
        if child is not None:
            child.stop(0.0 if is_stuck else self._close_seconds)

    def _fail_start(self, error: BaseException) -> bool:
        """Give `error` to the constructor; False when that has returned."""
        if self._ready.done():
            return False
        self._ready.set_exception(error)
        return True

    def _take(self, child: ChildProcess, event: Event) -> None:
        match event:
            case Step():
                self._last_progress = time.monotonic()
                for output in event.outputs:
                    self._deliver(output, child)
            case Accepted():
                submission = self._pending.pop(event.request_id)
                self._receivers[event.request_id] = submission.on_output
                submission.accepted.set_result(None)
            case Refused():
                submission = self._pending.pop(event.request_id)
                submission.accepted.set_exception(exception_of(event.failure))
            case Log():
                logging.getLogger(event.logger).log(event.level, "%s", event.text)
            case Hello():
                child.connect()
                child.send(self._load)
            case Ready():
                self._ready.set_result(event)
            case Failed():
                raise exception_of(event.failure)

    def _send_commands(self, child: ChildProcess) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Abort):
                if command.request_id in self._receivers or command.request_id in self._pending:
                    child.send(command)
            elif command.accepted.set_running_or_notify_cancel():
                try:
                    self._submit_now(child, command)
                except InvalidRequestError as error:
                    command.accepted.set_exception(error)

    def _submit_now(self, child: ChildProcess, submission: _Submission) -> None:
        request_id = submission.request.request_id
        if request_id in self._receivers or request_id in self._pending:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by a request that is still running",
                param="request_id",
            )
        data = encode_request(submission.request)
        self._pending[request_id] = submission
        child.send_encoded(data)

    def _deliver(self, output: TokenOutput, child: ChildProcess) -> None:
        receiver = self._receivers.get(output.request_id)
        if receiver is None:
            return
        if output.finish_reason is not None:
            del self._receivers[output.request_id]
        try:
            receiver(output)
        except Exception:
            logger.exception("the receiver of request %s raised", output.request_id)
            if self._receivers.pop(output.request_id, None) is not None:
                child.send(Abort(output.request_id))

    def _end(self, reason: FinishReason, error: str | None) -> None:
        with self._lock:
            self._refusal = self._failure or EngineError("the engine is closed")
            self._waker.close()
            self._wakened.close()
            commands = tuple(self._commands)
            self._commands.clear()
        for submission in self._pending.values():
            submission.accepted.set_exception(self._refusal)
        self._pending.clear()
        for command in commands:
            if isinstance(command, _Submission) and command.accepted.set_running_or_notify_cancel():
                command.accepted.set_exception(self._refusal)
        while self._receivers:
            request_id, receiver = self._receivers.popitem()
            try:
                receiver(TokenOutput(request_id, finish_reason=reason, error=error))
            except Exception:
                logger.exception("the receiver of request %s raised", request_id)


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    logger.exception("the engine's client failed")
    return EngineError(engine_failure(error, "the engine failed").message)
