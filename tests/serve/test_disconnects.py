"""Clients that leave: two steps later the engine holds nothing of theirs, whatever it was doing."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette

from qwen35_jax.engine.buckets import Buckets
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.runner import Runner
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.engine.stats import EngineStats
from qwen35_jax.engine.thread import EngineThread
from qwen35_jax.step import Sizes
from qwen35_jax.tokenizer import Tokenizer
from serve.app import create_app
from serve.config import ServeConfig
from serve.engine_client import EngineClient
from tests.serve.harness import WAIT_SECONDS, RawExchange, run, until
from tests.support.engines import two_layer_params
from tests.support.models import COMPILE_FAST

VOCABULARY_SIZE = 78
MAX_MODEL_LEN, PAGE_SIZE = 256, 16
# One sequence at a time, and 64 tokens of its prompt a step.
SIZES = Sizes(num_pages=33, page_size=PAGE_SIZE, num_slots=2, max_model_len=MAX_MODEL_LEN)
LONG_ANSWER = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}
LONG_PROMPT = {"prompt": [5] * 250, "max_tokens": 4}
# Enough for any test here.
ALL_STEPS = 10_000


class GatedEngine:
    """A real engine that makes as many steps as it has been let make."""

    def __init__(self, engine: ContinuousBatchingEngine):
        self.engine = engine
        self.scheduler = engine.scheduler
        self._allowed = threading.Semaphore(0)
        self.steps = 0

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def submit(self, request: Request) -> None:
        self.engine.submit(request)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> list[TokenOutput]:
        assert self._allowed.acquire(timeout=WAIT_SECONDS)
        outputs = self.engine.step()
        self.scheduler.check_invariants()
        self.steps += 1
        return outputs

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """The tests share what is inside."""

    def held(self) -> tuple[int, int, int, int]:
        """Running and waiting sequences, state slots and KV pages that are taken."""
        scheduler = self.scheduler
        return (
            scheduler.num_running,
            scheduler.num_waiting,
            SIZES.num_slots - 1 - scheduler.num_free_slots,
            scheduler.num_pages - scheduler.num_free_pages,
        )


class Server:
    """The app over a gated engine, and its clients."""

    def __init__(self, app: Starlette, engine: GatedEngine, thread: EngineThread):
        self.engine = engine
        self.thread = thread
        self._app = app
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def ask(self, **body: Any) -> RawExchange:
        exchange = RawExchange(self._app, body)
        self._tasks[id(exchange)] = asyncio.create_task(exchange.run())
        return exchange

    async def end_of(self, exchange: RawExchange) -> None:
        await self._tasks[id(exchange)]

    async def step_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.step(1)

    async def step(self, count: int) -> None:
        wanted = self.engine.steps + count
        self.engine.allow(count)
        await until(lambda: self.engine.steps == wanted)
        # What came of it is on its way to the clients.
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def engine() -> Iterator[ContinuousBatchingEngine]:
    buckets = Buckets.make(max_rows=1, max_chunks=1, few=True)
    runner = Runner(two_layer_params(), VOCABULARY_SIZE, SIZES, buckets)
    runner.compile(compiler_options=COMPILE_FAST)
    engine = ContinuousBatchingEngine(
        runner=runner,
        scheduler=Scheduler(
            num_slots=SIZES.num_slots,
            num_pages=SIZES.num_pages,
            page_size=PAGE_SIZE,
            max_num_seqs=1,
            max_num_batched_tokens=65,
            max_model_len=MAX_MODEL_LEN,
            max_chunks=1,
        ),
        vocabulary_size=VOCABULARY_SIZE,
        max_model_len=MAX_MODEL_LEN,
        stop_token_ids=frozenset(),
    )
    yield engine
    engine.close()


@asynccontextmanager
async def serving(engine: ContinuousBatchingEngine, tokenizer: Tokenizer) -> AsyncIterator[Server]:
    gated = GatedEngine(engine)
    assert gated.held() == (0, 0, 0, 0)
    with EngineThread(gated) as thread:
        app = create_app(
            config=ServeConfig(served_model_name="tiny"),
            client=EngineClient(thread),
            tokenizer=tokenizer,
            max_model_len=MAX_MODEL_LEN,
        )
        try:
            yield Server(app, gated, thread)
        finally:
            gated.allow(ALL_STEPS)


def with_server(
    engine: ContinuousBatchingEngine,
    tokenizer: Tokenizer,
    check: Callable[[Server], Awaitable[None]],
) -> None:
    async def checked() -> None:
        async with serving(engine, tokenizer) as server:
            await check(server)

    run(checked())


async def leave(server: Server, exchange: RawExchange) -> None:
    """Go, and let the engine make two steps: the one that it is in, and one that knows of it."""
    exchange.leave()
    await server.end_of(exchange)
    await server.step(2)


async def check_empty(server: Server) -> None:
    assert server.engine.held() == (0, 0, 0, 0)
    assert server.engine.stats().kv_tokens_used == 0
    assert server.thread.in_flight == 0 and not server.engine.has_work()
    # And it serves the next one.
    server.engine.allow(ALL_STEPS)
    answer = server.ask(prompt=[1, 2], max_tokens=3)
    await server.end_of(answer)
    assert answer.sent[0]["status"] == 200


def test_a_stream_dropped_after_one_chunk_leaves_nothing(
    engine: ContinuousBatchingEngine, tokenizer: Tokenizer
):
    async def check(server: Server) -> None:
        stream = server.ask(**LONG_ANSWER, stream=True)
        await server.step_until(lambda: len(stream.sent) >= 2)
        assert server.engine.held() == (1, 0, 1, 1)
        await leave(server, stream)
        await check_empty(server)

    with_server(engine, tokenizer, check)


def test_a_whole_answer_dropped_in_the_middle_of_its_prompt_leaves_nothing(
    engine: ContinuousBatchingEngine, tokenizer: Tokenizer
):
    async def check(server: Server) -> None:
        before = engine.stats()
        answer = server.ask(**LONG_PROMPT)
        await server.step(2)
        stats = engine.stats()
        assert 0 < stats.prompt_tokens - before.prompt_tokens < len(LONG_PROMPT["prompt"])
        assert stats.generation_tokens == before.generation_tokens
        assert server.engine.held()[:3] == (1, 0, 1)
        await leave(server, answer)
        await check_empty(server)

    with_server(engine, tokenizer, check)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_dropped_while_it_waits_leaves_the_one_that_runs(
    engine: ContinuousBatchingEngine, tokenizer: Tokenizer, stream: bool
):
    async def check(server: Server) -> None:
        runs = server.ask(**LONG_ANSWER, stream=True)
        await server.step_until(lambda: len(runs.sent) >= 2)
        baseline = server.engine.held()
        waits = server.ask(**LONG_ANSWER, stream=stream)
        await server.step_until(lambda: server.engine.scheduler.num_waiting == 1)
        await leave(server, waits)
        assert server.engine.held() == baseline == (1, 0, 1, 1)
        assert server.thread.in_flight == 1
        seen = len(runs.sent)
        await server.step_until(lambda: len(runs.sent) > seen)
        await leave(server, runs)
        await check_empty(server)

    with_server(engine, tokenizer, check)
