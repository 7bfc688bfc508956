"""The engine's process as its parent holds it: started, spoken to, ended. No jax here."""

import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import zmq

from qwen35_jax.engine.messages import (
    COMMANDS_SOCKET,
    EVENTS_SOCKET,
    Close,
    Command,
    Event,
    decode_event,
    encode,
)
from qwen35_jax.errors import ConfigError

logger = logging.getLogger(__name__)

# A new interpreter that inherits nothing of this one but where it finds modules. Not that of
# multiprocessing, which runs the caller's main script again and leaves a helper process behind.
START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from qwen35_jax.engine.process_main import main; sys.exit(main(sys.argv[1]))"
)
# A process whose end of the lifeline has closed is all but gone.
SECONDS_TO_GO = 5.0
# So that an engine of very short steps can't keep commands from being sent.
EVENTS_AT_ONCE = 100


class ChildProcess:
    """Starts process_main.py. Used by one thread, the one that makes it.

    On Linux the process ends with that thread, not only with this process.

    wakened: a socket that ends `wait` when it can be read.

    Raises ConfigError where no socket can be made.
    """

    def __init__(self, wakened: socket.socket):
        self.is_gone = False
        self._wakened = wakened
        with ExitStack() as resources:
            context = zmq.Context()
            resources.callback(context.destroy, linger=0)
            self._events = context.socket(zmq.PULL)
            self._commands = context.socket(zmq.PUSH)
            for endpoint in (self._events, self._commands):
                endpoint.set_hwm(0)
            try:
                # Only this user can enter it.
                self._directory = Path(tempfile.mkdtemp(prefix="qwen35-"))
                resources.callback(shutil.rmtree, self._directory, ignore_errors=True)
                self._events.bind(f"ipc://{self._directory / EVENTS_SOCKET}")
            except (OSError, zmq.ZMQError) as error:
                raise ConfigError(
                    f"can't make a socket in the directory for temporary files: {error}; set "
                    "TMPDIR to another one, of a short path"
                ) from None
            self._lifeline, theirs = socket.socketpair()
            resources.enter_context(self._lifeline)
            with theirs, _interrupts_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", START, str(self._directory), *sys.path],
                    stdin=theirs.fileno(),
                )
            self._poller = zmq.Poller()
            for readable in (self._events, self._lifeline, wakened):
                self._poller.register(readable, zmq.POLLIN)
            self._resources = resources.pop_all()

    def wait(self) -> None:
        """Until an event has come, `wakened` can be read or the process is gone."""
        ready = dict(self._poller.poll())
        self.is_gone = self._lifeline.fileno() in ready
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)

    def events(self) -> Iterator[Event]:
        """The next events that have come already."""
        with suppress(zmq.Again):
            for _ in range(EVENTS_AT_ONCE):
                yield decode_event(self._events.recv(zmq.NOBLOCK))

    def connect(self) -> None:
        """Make commands possible, once the process listens."""
        self._commands.connect(f"ipc://{self._directory / COMMANDS_SOCKET}")

    def send(self, command: Command) -> None:
        self.send_encoded(encode(command))

    def send_encoded(self, command: bytes) -> None:
        # Nobody to send to: `wait` says that the process is gone, if it ever was there.
        with suppress(zmq.Again):
            self._commands.send(command, zmq.NOBLOCK)

    def how_it_ended(self) -> str:
        """One line about a process that is gone."""
        if not self._ends_within(SECONDS_TO_GO):
            return "the engine process does not answer"
        code = self._process.returncode
        if code < 0:
            return f"the engine process was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"the engine process ended with exit code {code}"

    def stop(self, seconds: float) -> None:
        """Have the process close its engine and end; kill it after `seconds`."""
        self.send(Close())
        # Ends one that is still loading; when the engine is loaded it is ignored.
        self._process.terminate()
        if not self._ends_within(seconds):
            logger.warning("the engine process did not end within %g s: killing it", seconds)
            self._process.kill()
            if not self._ends_within(SECONDS_TO_GO):
                logger.error("the engine process %d can't be killed", self._process.pid)
        self._resources.close()

    def _ends_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that starts inside has Ctrl-C blocked, until it says how to take it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
