"""The engine's own process: what it gives, what it refuses, and that its end loses no request."""

import os
import queue
import signal
import time
from collections.abc import Iterator

import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.process import EngineProcess
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import EngineError, EngineThread
from qwen35_jax.errors import CheckpointError, InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from tests.support import process_engines
from tests.support.process_engines import TroubledEngine

FACTORIES = "tests.support.process_engines"
WAIT_SECONDS = 60


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
        deadline = time.monotonic() + WAIT_SECONDS
        while process.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.failure is not None
        with pytest.raises(EngineError):
            process.submit(request("late", 1), arrived.put)


def test_a_step_that_raises_is_the_failures_reason():
    with start() as process:
        found = outputs_of(process, [request("bad", process_engines.RAISE)])
        assert found["bad"][-1].finish_reason == "error"
        assert "out of memory" in str(process.failure)
