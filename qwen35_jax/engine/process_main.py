"""The engine's process: what EngineProcess starts, for nobody else to call. No jax of its own.

It loads an engine, steps it while there is work, and tells its parent what came of every step. It
lives for its parent only: Ctrl-C and SIGTERM, which a terminal and a service manager send to both,
are the parent's to answer, and when the parent is gone, however it went, so is this process.
"""

import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol

import zmq

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.messages import (
    COMMANDS_SOCKET,
    EVENTS_SOCKET,
    Abort,
    Accepted,
    Close,
    Command,
    Event,
    Failed,
    Hello,
    Load,
    Log,
    Ready,
    Refused,
    Step,
    Submit,
    decode_command,
    decode_request,
    encode,
    engine_failure,
    failure_of,
)
from qwen35_jax.engine.request import Engine, TokenOutput
from qwen35_jax.errors import USER_ERRORS, InvalidRequestError

logger = logging.getLogger(__name__)

# Of Linux's prctl.
PR_SET_PDEATHSIG = 1
LAST_WORDS_MILLISECONDS = 1000


class LoadedEngine(Protocol):
    """What a factory returns. description: one line about the model and what it runs on."""

    @property
    def engine(self) -> Engine: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def model_name(self) -> str: ...
    @property
    def description(self) -> str: ...


def main(directory: str) -> int:
    """Run until the parent says Close or is gone. directory: where its sockets are.

    Standard input is one end of a socket whose other end the parent holds and never writes to.
    """
    # Blocked by the parent until here, so that no Ctrl-C finds Python's own handler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _open_closed_streams()
    _end_with_parent()
    with zmq.Context() as context, Parent(context, Path(directory)) as parent:
        return _load_and_run(parent)


class Parent:
    """Both ways to the parent. Any thread may send; one receives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path):
        self._directory = directory
        # Who receives binds: a socket that connects can be sent to before the other end is there.
        self._commands = context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._commands.bind(f"ipc://{directory / COMMANDS_SOCKET}")
        self._events = context.socket(zmq.PUSH)
        self._events.set_hwm(0)
        self._events.setsockopt(zmq.LINGER, LAST_WORDS_MILLISECONDS)
        self._events.connect(f"ipc://{directory / EVENTS_SOCKET}")
        self._sending = threading.Lock()

    def __enter__(self) -> "Parent":
        return self

    def __exit__(self, *error: object) -> None:
        self._commands.close()
        self._events.close()

    def send(self, event: Event) -> None:
        """Hand an event over; it is written by a thread of the socket's own."""
        data = encode(event)
        with self._sending:
            self._events.send(data)

    def receive(self, *, wait: bool) -> Command | None:
        """The next command; None when there is none now and `wait` is false."""
        try:
            return decode_command(self._commands.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait_for_load(self) -> Load:
        """What to load; the files of the sockets are gone then, both being connected."""
        command = self.receive(wait=True)
        assert isinstance(command, Load)
        shutil.rmtree(self._directory, ignore_errors=True)
        return command

    def wait_for_close(self) -> None:
        while not isinstance(self.receive(wait=True), Close):
            pass


class LogToParent(logging.Handler):
    """Sends records to the parent, whose loggers decide what becomes of them."""

    def __init__(self, parent: Parent):
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._parent.send(Log(record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


class EngineLoop:
    """Steps an engine for the parent: its commands before each step, one event after it."""

    def __init__(self, engine: Engine, parent: Parent):
        self._engine = engine
        self._parent = parent
        self._open: set[str] = set()
        self._aborted: set[str] = set()

    def run(self) -> None:
        """Until the parent says Close. Raises what a step raises."""
        while self._obey():
            # A request that was aborted may be gone from the engine's own count of work, its last
            # output still to come.
            if self._open or self._engine.has_work():
                self._tell(self._engine.step())
                if self._open and not self._engine.has_work():
                    self._tell(self._forgotten())

    def _obey(self) -> bool:
        """Carry out what has arrived, waiting where there is nothing to step; False for Close."""
        idle = not self._open and not self._engine.has_work()
        while (command := self._parent.receive(wait=idle)) is not None:
            match command:
                case Submit():
                    self._submit(command)
                case Abort():
                    if command.request_id in self._open:
                        self._aborted.add(command.request_id)
                        self._engine.abort(command.request_id)
                case Close():
                    return False
                case Load():
                    raise AssertionError("the engine is loaded already")
            idle = False
        return True

    def _submit(self, submit: Submit) -> None:
        request_id = submit.request_id
        try:
            self._engine.submit(decode_request(submit))
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logger.exception("request %s failed before it ran", request_id)
            self._parent.send(Refused(request_id, failure_of(error, "the request failed")))
        else:
            self._open.add(request_id)
            self._parent.send(Accepted(request_id))

    def _tell(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
                self._aborted.discard(output.request_id)
        self._parent.send(Step(outputs))

    def _forgotten(self) -> list[TokenOutput]:
        """Last outputs for requests that an idle engine never ended."""
        return [
            TokenOutput(request_id, finish_reason="abort")
            if request_id in self._aborted
            else TokenOutput(
                request_id, finish_reason="error", error="the engine dropped the request"
            )
            for request_id in self._open
        ]


def _load_and_run(parent: Parent) -> int:
    parent.send(Hello())
    load = parent.wait_for_load()
    logging.getLogger().addHandler(LogToParent(parent))
    logging.getLogger("qwen35_jax").setLevel(load.log_level)
    try:
        loaded = _function(load.factory)(load.config)
    except BaseException as error:
        if not isinstance(error, USER_ERRORS):
            logger.exception("loading the engine failed")
        parent.send(Failed(failure_of(error, "loading the engine failed")))
        parent.wait_for_close()
        return 1
    # From here on the parent decides: it may let running requests end first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.send(Ready(os.getpid(), loaded.model_name, loaded.max_model_len, loaded.description))
    exit_code = 0
    try:
        EngineLoop(loaded.engine, parent).run()
    except BaseException as error:
        logger.exception("the engine failed; it takes no more requests")
        parent.send(Failed(engine_failure(error, "the engine failed")))
        parent.wait_for_close()
        exit_code = 1
    try:
        loaded.engine.close()
    except Exception:
        logger.exception("closing the engine failed")
        exit_code = 1
    return exit_code


def _function(name: str) -> Callable[[EngineConfig], LoadedEngine]:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _open_closed_streams() -> None:
    # Where the parent has none, the next file or socket would take their numbers, and get what
    # compilers and drivers write to them.
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Takes the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _end_with_parent() -> None:
    # By the kernel, whatever this process is doing then; and by the socket's end, which is there
    # on every system and for a parent that died before this line.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_exit_at_end_of, args=(lifeline,), name="lifeline", daemon=True).start()


def _exit_at_end_of(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)
