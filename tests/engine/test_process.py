"""The engine's own process: what it gives, what it refuses, and that its end loses no request."""

import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.messages import COMMANDS_SOCKET
from qwen35_jax.engine.process import EngineProcess
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import EngineError, EngineThread
from qwen35_jax.errors import CheckpointError, InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from tests.support import process_engines
from tests.support.process_engines import TroubledEngine
from tests.support.processes import WAIT_SECONDS, children_of, is_alive, wait_until

FACTORIES = "tests.support.process_engines"


def start(factory: str = "load") -> EngineProcess:
    return EngineProcess(f"{FACTORIES}:{factory}", EngineConfig(model="x", max_num_seqs=8))


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with start() as started:
        yield started


def outputs_of(
    engine: EngineProcess | EngineThread, requests: list[Request]
) -> dict[str, list[TokenOutput]]:
    """All outputs of requests that run side by side."""
    arrived: queue.Queue[TokenOutput] = queue.Queue()
    for request in requests:
        engine.submit(request, arrived.put)
    found: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    unfinished = set(found)
    while unfinished:
        output = arrived.get(timeout=WAIT_SECONDS)
        found[output.request_id].append(output)
        if output.finish_reason is not None:
            unfinished.remove(output.request_id)
    return found


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def request(name: str, *ids: int, max_tokens: int = 5) -> Request:
    params = SamplingParams(max_tokens=max_tokens, logprobs=2, logit_bias={3: 1.0})
    return Request(name, ids, params)


def test_outputs_are_those_of_the_engine_in_a_thread(process: EngineProcess):
    assert process.description == "fake engine, no model"
    requests = [request(f"r{number}", number, 7, max_tokens=number + 1) for number in range(12)]
    with EngineThread(TroubledEngine(max_num_seqs=8)) as thread:
        wanted = outputs_of(thread, requests)
    assert outputs_of(process, requests) == wanted
    assert process.in_flight == 0 and process.is_running and process.failure is None


def test_refusals_name_field_and_code(process: EngineProcess):
    with pytest.raises(InvalidRequestError) as refused:
        process.submit(request("long", *range(6000)), print)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")


def test_an_abort_ends_its_request(process: EngineProcess):
    arrived: queue.Queue[TokenOutput] = queue.Queue()
    process.submit(request("endless", 1, max_tokens=4000), arrived.put)
    arrived.get(timeout=WAIT_SECONDS)
    process.abort("endless")
    while (output := arrived.get(timeout=WAIT_SECONDS)).finish_reason is None:
        pass
    assert output.finish_reason == "abort"


def test_a_users_mistake_in_loading_is_raised_here():
    with pytest.raises(CheckpointError, match="truncated; fetch it again"):
        start("refuse_checkpoint")


def test_a_killed_process_ends_every_request_and_says_so():
    with start() as process:
        arrived: queue.Queue[TokenOutput] = queue.Queue()
        process.submit(request("lost", 1, max_tokens=4000), arrived.put)
        os.kill(process.process_id, signal.SIGKILL)
        while (output := arrived.get(timeout=WAIT_SECONDS)).finish_reason is None:
            pass
        assert output.finish_reason == "error" and output.error
        wait_until(lambda: not process.is_running)
        assert process.failure is not None
        with pytest.raises(EngineError):
            process.submit(request("late", 1), arrived.put)


def test_a_step_that_raises_is_the_failures_reason():
    with start() as process:
        found = outputs_of(process, [request("bad", process_engines.RAISE)])
        assert found["bad"][-1].finish_reason == "error"
        assert "out of memory" in str(process.failure)


def test_refusals_of_every_kind_leave_the_engine_running(
    process: EngineProcess, caplog: pytest.LogCaptureFixture
):
    endless, last = queue.Queue[TokenOutput](), queue.Queue[TokenOutput]()
    process.submit(request("same", 1, max_tokens=4000), endless.put)
    with pytest.raises(InvalidRequestError, match="'same' is in use"):
        process.submit(request("same", 2), print)
    with pytest.raises(InvalidRequestError, match="no integer of 64 bits"):
        process.submit(request("huge", 2**64), print)
    with pytest.raises(EngineError, match="the request failed: KeyError: 'a bug in submit'"):
        process.submit(request("bug", process_engines.BREAK_SUBMIT), print)
    assert "a bug in submit" in caplog.text
    process.abort("same")
    process.submit(request("good", 3), last.put)
    assert last.get(timeout=WAIT_SECONDS).finish_reason is None
    wait_until(lambda: process.in_flight == 0)


def test_a_request_that_the_engine_forgot_still_ends(process: EngineProcess):
    found = outputs_of(process, [request("lost", process_engines.FORGET, max_tokens=4000)])
    assert found["lost"][-1].error == "the engine dropped the request"


def test_a_receiver_that_raises_loses_its_request_only(
    process: EngineProcess, caplog: pytest.LogCaptureFixture
):
    def fail(output: TokenOutput) -> None:
        raise RuntimeError("a receiver's bug")

    process.submit(request("bad", 1, max_tokens=4000), fail)
    assert len(outputs_of(process, [request("good", 2, max_tokens=20)])["good"]) == 20
    wait_until(lambda: process.in_flight == 0)
    assert "a receiver's bug" in caplog.text and process.failure is None


def test_log_lines_come_out_of_the_loggers_here_and_neither_side_has_jax(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "qwen35_jax")
    with start() as process:
        outputs_of(process, [request("log", process_engines.LOG)])
    assert ("qwen35_jax.fake", logging.INFO, "loading x") in caplog.record_tuples
    line = "a step says so; jax is not"
    assert ("qwen35_jax.fake", logging.WARNING, line) in caplog.record_tuples


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("break_down", "loading the engine failed: ZeroDivisionError: a bug in loading"),
        ("die", r"the engine process was killed by signal 11 \(Segmentation fault\)"),
        ("nowhere", "loading the engine failed: AttributeError"),
    ],
)
def test_other_failures_of_loading_are_one_line(factory: str, message: str):
    before = open_descriptors()
    with pytest.raises(EngineError, match=message):
        start(factory)
    assert open_descriptors() == before


def test_an_interrupt_while_loading_leaves_no_process(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "qwen35_jax")

    def interrupt() -> None:
        wait_until(lambda: "loading for ever" in caplog.text)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        start("load_for_ever")
    interrupter.join()
    assert not is_alive(int(caplog.text.split("loading for ever in ")[1].split()[0]))


def test_work_that_no_step_moves_counts_as_stuck(caplog: pytest.LogCaptureFixture):
    with EngineProcess(
        f"{FACTORIES}:load", EngineConfig(model="x"), stuck_after_seconds=0.2
    ) as process:
        outputs_of(process, [request("good", 1)])
        wait_until(lambda: process.in_flight == 0)
        assert process.stuck_for == 0
        time.sleep(0.5)
        arrived: queue.Queue[TokenOutput] = queue.Queue()
        process.submit_soon(request("stuck", process_engines.HANG), arrived.put)
        # Counted from here on, not from the last step before the rest.
        assert process.stuck_for < 0.5
        wait_until(lambda: process.stuck_for >= process.stuck_after_seconds)
        waiting = process.submit_soon(request("behind", 1), arrived.put)
        assert process.is_running and process.failure is None
    assert process.stuck_for == 0
    # It does not get the seconds to end that others get, which it would not use.
    assert "did not end within 0 s: killing it" in caplog.text
    assert not is_alive(process.process_id)
    assert arrived.get(timeout=WAIT_SECONDS).finish_reason == "abort"
    assert isinstance(waiting.exception(), EngineError)


def test_an_engine_that_is_never_idle_is_not_stuck(process: EngineProcess):
    arrived: queue.Queue[TokenOutput] = queue.Queue()
    process.submit(request("long", 1, max_tokens=400), arrived.put)
    seconds = []
    while arrived.get(timeout=WAIT_SECONDS).finish_reason is None:
        seconds.append(process.stuck_for)
    # A step takes a millisecond: counted from the first on, all of these were over 0.2.
    assert min(seconds[200:]) < 0.2


def test_close_aborts_what_runs_and_leaves_neither_process_nor_descriptors():
    before = open_descriptors()
    process = start()
    arrived: queue.Queue[TokenOutput] = queue.Queue()
    process.submit(request("endless", 1, max_tokens=4000), arrived.put)
    process.close()
    process.close()
    while (output := arrived.get(timeout=WAIT_SECONDS)).finish_reason is None:
        pass
    assert output.finish_reason == "abort" and process.failure is None
    assert not is_alive(process.process_id)
    assert open_descriptors() == before
    with pytest.raises(EngineError, match="the engine is closed"):
        process.submit(request("late", 1), print)


def test_the_process_gets_no_file_of_its_parent_and_gives_its_children_none(tmp_path: Path):
    with (tmp_path / "listener").open("w") as file, socket.create_server(("127.0.0.1", 0)) as tcp:
        for ours in (file.fileno(), tcp.fileno()):
            os.set_inheritable(ours, True)
        wanted = {os.readlink(f"/proc/self/fd/{ours}") for ours in (file.fileno(), tcp.fileno())}
        with start("load_and_tell_files") as process:
            theirs, inheritable = json.loads(process.description)
    assert not wanted & set(theirs.values())
    assert theirs["0"] == os.devnull
    assert sorted(inheritable) == [0, 1, 2]


def test_closed_streams_of_the_parent_are_no_sockets_in_the_process():
    program = (
        "import os; os.close(1); os.close(2)\n"
        "from qwen35_jax.config import EngineConfig\n"
        "from qwen35_jax.engine.process import EngineProcess\n"
        f"with EngineProcess('{FACTORIES}:load_and_tell_files', EngineConfig()) as process:\n"
        "    os.write(int(__import__('sys').argv[1]), process.description.encode())\n"
    )
    reader, writer = os.pipe()
    with open(reader) as told:
        subprocess.run([sys.executable, "-c", program, str(writer)], pass_fds=[writer], check=True)
        os.close(writer)
        theirs, inheritable = json.loads(told.read())
    assert {theirs[number] for number in "012"} == {os.devnull}
    assert sorted(inheritable) == [0, 1, 2]


@pytest.mark.parametrize("state", ["idle", "hanging", "loading"])
def test_the_process_ends_with_a_parent_that_is_killed(state: str):
    factory = "load_for_ever" if state == "loading" else "load"
    program = (
        "import logging, sys, threading, time\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from qwen35_jax.config import EngineConfig\n"
        "from qwen35_jax.engine.process import EngineProcess\n"
        "from tests.engine.test_process import request\n"
        f"process = EngineProcess('{FACTORIES}:{factory}', EngineConfig())\n"
        f"if {state == 'hanging'}:\n"
        f"    process.submit(request('stuck', {process_engines.HANG}), print)\n"
        "print('started', flush=True)\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        wanted = b"loading for ever" if state == "loading" else b"started"
        while wanted not in parent.stdout.readline():
            assert parent.poll() is None
        (child,) = children_of(parent.pid)
        assert is_alive(child)
        parent.kill()
        wait_until(lambda: not is_alive(child))


def test_without_help_of_the_kernel_the_process_ends_when_its_lifeline_does(tmp_path: Path):
    program = (
        "import sys; sys.platform = 'other'\n"
        "from qwen35_jax.engine.process_main import main\n"
        "main(sys.argv[1])"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdin=theirs.fileno()
        )
    with child:
        try:
            # It listens now, for a parent that never speaks.
            wait_until(lambda: (tmp_path / COMMANDS_SOCKET).exists())
            assert child.poll() is None
            ours.close()
            assert child.wait(WAIT_SECONDS) == 1
        finally:
            child.kill()


def test_an_interrupt_before_the_thread_has_started_leaves_an_exit_that_goes_well(
    monkeypatch: pytest.MonkeyPatch,
):
    at_exit: list[Callable[[], None]] = []

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EngineProcess("never:imported", EngineConfig())
    (close,) = at_exit
    close()
    # Else the program's end would: its thread, which never was, closes them.
    engine: Any = close
    for end in (engine.__self__._waker, engine.__self__._wakened):
        end.close()
