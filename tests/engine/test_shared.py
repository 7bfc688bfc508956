"""SharedEngine: threads and tasks that wait share steps, and nobody's end is another's."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from qwen35_jax.engine.fake import FakeEngine, hashed_id
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.shared import Inbox, SharedEngine
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams

VOCABULARY = 1000
TOKENS = 20


def request(name: str, first: int = 1, max_tokens: int = TOKENS) -> Request:
    return Request(name, (first, 2), SamplingParams(temperature=0.0, max_tokens=max_tokens))


def expected(first: int, count: int = TOKENS) -> list[int]:
    return [hashed_id((first, 2), position, VOCABULARY) for position in range(count)]


def receive_all(inbox: Inbox) -> list[int]:
    ids: list[int] = []
    while outputs := inbox.receive():
        ids += [token_id for output in outputs for token_id in output.token_ids]
    return ids


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(vocabulary_size=VOCABULARY, max_num_seqs=64)


def test_threads_share_steps_and_each_gets_its_own(engine: FakeEngine):
    shared = SharedEngine(engine)
    all_submitted = threading.Barrier(8)

    def one(number: int) -> list[int]:
        with shared.inbox() as inbox:
            inbox.submit(request(f"r{number}", number))
            all_submitted.wait()
            return receive_all(inbox)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(one, range(8)))
    assert found == [expected(number) for number in range(8)]
    assert engine.stats().steps == TOKENS


def test_tasks_share_steps_and_each_gets_its_own(engine: FakeEngine):
    shared = SharedEngine(engine)

    async def one(number: int) -> list[int]:
        ids: list[int] = []
        with shared.inbox() as inbox:
            inbox.submit(request(f"r{number}", number))
            while outputs := await inbox.receive_async():
                ids += [token_id for output in outputs for token_id in output.token_ids]
        return ids

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    assert asyncio.run(all_of_them()) == [expected(number) for number in range(8)]
    # A step may run for some of them while the others are still taking their outputs.
    assert engine.stats().steps < 8 * TOKENS


def test_a_cancelled_task_ends_its_request_and_no_other(engine: FakeEngine):
    shared = SharedEngine(engine)

    async def one(name: str, number: int, after: int | None = None) -> list[int]:
        ids: list[int] = []
        with shared.inbox() as inbox:
            inbox.submit(request(name, number))
            while outputs := await inbox.receive_async():
                ids += [token_id for output in outputs for token_id in output.token_ids]
                if after is not None and len(ids) >= after:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
        return ids

    async def both() -> tuple[object, object]:
        return await asyncio.gather(one("gone", 1, 3), one("kept", 2), return_exceptions=True)

    gone, kept = asyncio.run(both())
    assert isinstance(gone, asyncio.CancelledError)
    assert kept == expected(2)
    engine.step()
    assert engine.stats().finished == {"abort": 1, "length": 1}
    assert not engine.has_work()


def test_leaving_an_inbox_aborts_what_is_left(engine: FakeEngine):
    shared = SharedEngine(engine)
    with shared.inbox() as inbox:
        inbox.submit(request("short", max_tokens=1))
        inbox.submit(request("long"))
        assert [output.request_id for output in inbox.receive()] == ["short", "long"]
    engine.step()
    assert not engine.has_work()
    assert engine.stats().finished == {"length": 1, "abort": 1}


def test_an_inbox_that_is_collected_in_the_middle_of_a_step_ends_its_request(engine: FakeEngine):
    """A stream that nobody refers to is closed wherever the collector runs."""
    shared = SharedEngine(engine)

    def stream(name: str):
        with shared.inbox() as inbox:
            inbox.submit(request(name))
            yield
            yield receive_all(inbox)

    forgotten = [stream("forgotten")]
    next(forgotten[0])
    step = engine.step

    def step_and_collect() -> list[TokenOutput]:
        forgotten.clear()
        gc.collect()
        return step()

    engine.step = step_and_collect
    with shared.inbox() as inbox:
        inbox.submit(request("kept", 3))
        assert receive_all(inbox) == expected(3)
    assert not engine.has_work()
    assert engine.stats().finished["abort"] == 1


def test_a_refused_request_leaves_the_inbox_usable(engine: FakeEngine):
    shared = SharedEngine(engine)
    with shared.inbox() as inbox:
        with pytest.raises(InvalidRequestError):
            inbox.submit(Request("long", (1,) * 5000, SamplingParams()))
        assert inbox.receive() == []
        inbox.submit(request("good", 4))
        assert receive_all(inbox) == expected(4)


def test_requests_that_the_engine_lost_end_the_wait(engine: FakeEngine):
    shared = SharedEngine(engine)
    with shared.inbox() as inbox:
        inbox.submit(request("lost"))
        engine._waiting.clear()
        assert inbox.receive() == []
