"""`qwen35 serve`: start an engine's process and serve it over HTTP until a signal says to stop.

The model is in that process. This one never imports jax.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from qwen35_jax.config import EngineConfig
from qwen35_jax.config_fields import positive_number
from qwen35_jax.engine.process import EngineProcess
from qwen35_jax.engine.thread import STUCK_AFTER_SECONDS, EngineError
from qwen35_jax.engine_arguments import (
    add_cache_arguments,
    add_dry_run_argument,
    add_engine_arguments,
    add_seed_argument,
    engine_config,
    log_to_terminal,
    print_memory_plan,
)
from qwen35_jax.errors import USER_ERRORS, ConfigError
from qwen35_jax.model_files import find_model
from serve.app import create_app
from serve.config import ServeConfig, check_served_model_name
from serve.engine_client import EngineClient

logger = logging.getLogger(__name__)

# What the engine's process calls, and imports, to load the engine.
ENGINE_FACTORY = "qwen35_jax.loading:load_engine"

# Longer than clients keep an idle connection, so that it is they who end it.
IDLE_CONNECTION_SECONDS = 75
# How long a client may take to read the end of its stream when the server stops.
LAST_READ_SECONDS = 2


def main(argv: Sequence[str] | None = None, *, factory: str = ENGINE_FACTORY) -> int:
    """Run the command; returns its exit code.

    0 after a signal, 1 when the engine failed, 2 for what the user can mend. factory: as in
    EngineProcess.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    log_to_terminal()
    with _signals_interrupt() as was_asked_to_stop:
        try:
            config = engine_config(parser, arguments, seed=arguments.seed)
            if arguments.dry_run:
                print_memory_plan(config)
            else:
                _load_and_serve(arguments, config, factory, was_asked_to_stop)
        except KeyboardInterrupt:
            return 0
        except USER_ERRORS as error:
            print(f"qwen35 serve: error: {error}", file=sys.stderr)
            return 2
        except EngineError as error:
            print(
                f"qwen35 serve: error: {error}; the server has stopped. Start it again; should "
                "that fail too, the lines above and the kernel's log (was memory short?) say more",
                file=sys.stderr,
            )
            return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen35 serve",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what requests call the model (default: the model's own name)",
    )
    parser.add_argument(
        "--stuck-after-seconds",
        type=float,
        metavar="SECONDS",
        default=STUCK_AFTER_SECONDS,
        help="/health answers 503 when requests have waited so long without the end of a step "
        "(default: %(default)g)",
    )
    add_dry_run_argument(parser)
    add_seed_argument(
        parser,
        help="seed of requests that bring none, and of dummy weights (default: %(default)s)",
    )
    return parser


@contextmanager
def _signals_interrupt() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, until the server has handlers of its own.

    Gives a function that says whether one came.
    """
    asked_to_stop = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked_to_stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _load_and_serve(
    arguments: argparse.Namespace,
    config: EngineConfig,
    factory: str,
    was_asked_to_stop: Callable[[], bool],
) -> None:
    """Raises EngineError when the engine failed, once what it left has ended."""
    served_model_name: str | None = arguments.served_model_name
    # Checked and bound before loading, which takes long, only to find the port taken.
    if served_model_name is not None:
        check_served_model_name(served_model_name)
    stuck_after_seconds = positive_number("stuck_after_seconds", arguments.stuck_after_seconds)
    with _bind(arguments.host, arguments.port) as listener:
        files = find_model(config)
        with EngineProcess(
            factory,
            # Found once: the process gets its place on this machine.
            replace(config, model=str(files.directory)),
            stuck_after_seconds=stuck_after_seconds,
        ) as engine:
            # An exception raised inside a callback of the garbage collector goes no further.
            if was_asked_to_stop():
                raise KeyboardInterrupt
            serve_config = ServeConfig(
                host=arguments.host,
                port=listener.getsockname()[1],
                served_model_name=files.name if served_model_name is None else served_model_name,
            )
            client = EngineClient(engine)
            app = create_app(
                config=serve_config,
                client=client,
                tokenizer=files.tokenizer,
                max_model_len=engine.max_model_len,
            )
            _listen(listener, serve_config)
            ready_message = f"{files.name}: {engine.description}\n{_how_to_use(serve_config)}"
            Server(app, serve_config, client, ready_message).run(sockets=[listener])
            if engine.failure is not None:
                raise engine.failure


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, not {port}")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _listen(listener: socket.socket, config: ServeConfig) -> None:
    # Two servers may bind one port while neither listens: the later one finds out here.
    try:
        listener.listen()
    except OSError as error:
        raise _cannot_listen(config.host, config.port, error) from None


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"can't listen on {host} port {port}: {reason}; choose another with --host and --port"
    )


def _how_to_use(config: ServeConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{config.port}"
    prompt = (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    body = json.dumps({"prompt": prompt, "max_tokens": 64, "temperature": 0})
    return (
        f"Ready: {config.served_model_name} at {url}\n"
        f"Try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    )


class Server(uvicorn.Server):
    """Stops on the first signal: when streams have ended, drain_seconds are over or a second comes.

    Streams still open then end as "abort"; connections whose client does not read that are cut.
    Stops by itself when the engine has failed, and says so in the log when it is stuck.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, client: EngineClient, ready_message: str):
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_CONNECTION_SECONDS,
                # Only for tasks that hang; the others have ended by then.
                timeout_graceful_shutdown=math.ceil(config.drain_seconds) + 2 * LAST_READ_SECONDS,
            )
        )
        self._client = client
        self._drain_seconds = config.drain_seconds
        self._ready_message = ready_message
        self._was_stuck = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not the inherited one: it has the signal raised again after a clean stop.
        is_first = not self.should_exit
        self.should_exit = True
        self._client.drain()
        if not is_first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_streams)
        elif self.server_state.tasks:
            _tell_from_signal_handler(
                f"Stopping: running requests have {self._drain_seconds:g} s to end; "
                "stop again to end them now"
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        print(self._ready_message, flush=True)

    async def on_tick(self, counter: int) -> bool:
        self._tell_whether_stuck()
        if self._client.has_failed:
            self.should_exit = True
        return await super().on_tick(counter)

    def _tell_whether_stuck(self) -> None:
        reason = self._client.stuck_reason
        if self._was_stuck and reason is None:
            logger.warning("the engine goes on; /health is as before")
        elif not self._was_stuck and reason is not None:
            logger.error(
                "%s: /health answers 503 until it goes on; if it does not, stop and start again",
                reason,
            )
        self._was_stuck = reason is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._client.drain()
        asyncio.get_running_loop().call_later(self._drain_seconds, self._end_streams)
        await super().shutdown(sockets)

    def _end_streams(self) -> None:
        self._client.abort_all()
        asyncio.get_running_loop().call_later(LAST_READ_SECONDS, self._cut_connections)

    def _cut_connections(self) -> None:
        # uvicorn would cancel their tasks and log that as failures, and uvloop can't be closed
        # while a connection has bytes to write.
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _tell_from_signal_handler(message: str) -> None:
    # Not print: the signal may have come in the middle of another print, and a pipe that nobody
    # reads any more must not keep the server from stopping. Without a stderr it is None.
    with suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), f"{message}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
