"""Requests and their outputs across the border between the engine's thread and asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import EngineError, EngineThread
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from serve.engine_client import EngineClient
from tests.serve.harness import TestEngine, run, until


def request(request_id: str = "a", prompt: tuple[int, ...] = (1,), **params: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(**params))


def with_client(
    engine: TestEngine, check: Callable[[EngineClient, EngineThread], Awaitable[None]]
) -> None:
    async def bounded() -> None:
        with EngineThread(engine) as thread:
            await check(EngineClient(thread), thread)

    run(bounded())


def test_outputs_of_several_requests_come_until_the_last_has_ended():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        generation = await client.generate([request("a", max_tokens=2), request("b", max_tokens=5)])
        outputs = [output async for output in generation]
        assert [output.request_id for output in outputs].count("a") == 2
        assert [output.request_id for output in outputs].count("b") == 5
        assert generation.is_complete

    with_client(TestEngine(), check)


def test_many_generations_at_once_keep_their_outputs_apart():
    async def one(client: EngineClient, number: int) -> list[int]:
        generation = await client.generate([request(str(number), (number,), max_tokens=20)])
        return [token_id async for output in generation for token_id in output.token_ids]

    async def check(client: EngineClient, thread: EngineThread) -> None:
        together = await asyncio.gather(*(one(client, number) for number in range(40)))
        alone = [await one(client, number) for number in range(40)]
        assert together == alone

    with_client(TestEngine(), check)


def test_when_one_request_is_refused_none_runs():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        with pytest.raises(InvalidRequestError):
            await client.generate([request("good", max_tokens=90), request("bad", ())])
        await until(lambda: thread.in_flight == 0)

    with_client(TestEngine(seconds_per_step=0.005), check)


def test_close_aborts_and_ends_an_iterator_that_waits():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        generation = await client.generate([request(max_tokens=90)])
        waiting = asyncio.create_task(anext(generation, None))
        await asyncio.sleep(0.01)
        generation.close()
        assert await waiting is None
        await until(lambda: thread.in_flight == 0)

    with_client(TestEngine(seconds_per_step=0.1), check)


def test_a_dropped_request_gives_no_more_outputs_and_the_others_go_on():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        requests = [request(name, max_tokens=20) for name in "ab"]
        generation = await client.generate(requests)
        seen: list[str] = []
        async for output in generation:
            seen.append(output.request_id)
            generation.drop("a")
        assert "a" not in seen[1:]
        assert seen.count("b") in (19, 20)

    with_client(TestEngine(), check)


def test_cancelling_a_submission_leaves_nothing_behind():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        first = await client.generate([request("first", max_tokens=90)])
        for delay in (0.0, 0.001, 0.02):
            task = asyncio.create_task(client.generate([request("second", max_tokens=90)]))
            await asyncio.sleep(delay)
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            for result in results:
                if not isinstance(result, BaseException):
                    result.close()
            await until(lambda: thread.in_flight == 1)
        first.close()

    with_client(TestEngine(seconds_per_step=0.005), check)


def test_drain_refuses_new_requests_and_lets_running_ones_end():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        generation = await client.generate([request(max_tokens=20)])
        client.drain()
        with pytest.raises(EngineError, match="shutting down"):
            await client.generate([request("late")])
        assert [output async for output in generation][-1].finish_reason == "length"

    with_client(TestEngine(), check)


def test_abort_all_does_not_wait_for_the_engine():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        generation = await client.generate([request(max_tokens=90)])
        client.abort_all()
        async with asyncio.timeout(0.3):
            assert [output async for output in generation] == [
                TokenOutput("a", finish_reason="abort")
            ]

    with_client(TestEngine(seconds_per_step=0.5), check)


def test_a_failed_engine_ends_generations_and_refuses_new_ones():
    async def check(client: EngineClient, thread: EngineThread) -> None:
        generation = await client.generate([request(max_tokens=90)])
        last = [output async for output in generation][-1]
        assert last.finish_reason == "error"
        with pytest.raises(EngineError, match="the device is gone"):
            await client.generate([request("late")])
        assert client.unavailable_reason == last.error

    with_client(TestEngine(fails_at_step=3), check)


def test_one_client_works_on_one_loop_after_another():
    with EngineThread(TestEngine()) as thread:
        client = EngineClient(thread)

        async def generate() -> int:
            generation = await client.generate([request(max_tokens=4)])
            return len([output async for output in generation])

        assert [run(generate()), run(generate())] == [4, 4]


def test_outputs_for_a_loop_that_is_gone_disturb_nobody(caplog: pytest.LogCaptureFixture):
    with EngineThread(TestEngine(seconds_per_step=0.001)) as thread:
        client = EngineClient(thread)

        async def leave_at_once() -> None:
            await client.generate([request("left", max_tokens=50)])

        async def generate() -> int:
            generation = await client.generate([request("next", max_tokens=60)])
            return len([output async for output in generation])

        run(leave_at_once())
        assert run(generate()) == 60
        assert thread.failure is None
    assert caplog.text == ""
