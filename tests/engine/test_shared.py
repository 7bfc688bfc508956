"""SharedEngine: threads and tasks that wait share steps, and nobody's end is another's."""

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from qwen35_jax.engine.fake import FakeEngine, hashed_id
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.shared import Inbox, SharedEngine
from qwen35_jax.errors import ConfigError, InvalidRequestError
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


# With the engine in the middle of a step


WAIT_SECONDS = 30


class HeldEngine(FakeEngine):
    """Stands still in a step until it may go on."""

    def __init__(self) -> None:
        super().__init__(vocabulary_size=VOCABULARY, max_num_seqs=64)
        self.is_in_step = threading.Event()
        self.may_go_on = threading.Event()

    def step(self) -> list[TokenOutput]:
        self.is_in_step.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        return super().step()


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


def test_leaving_does_not_wait_for_a_step_in_another_thread():
    engine = HeldEngine()
    shared = SharedEngine(engine)
    with ThreadPoolExecutor(1) as threads, shared.inbox() as stays:
        stays.submit(request("stays"))
        with shared.inbox() as leaves:
            leaves.submit(request("leaves", max_tokens=100))
            receiving = threads.submit(receive_all, stays)
            assert engine.is_in_step.wait(WAIT_SECONDS)
        engine.may_go_on.set()
        assert receiving.result(WAIT_SECONDS) == expected(1)
    assert engine.stats().finished == {"abort": 1, "length": 1}


def test_a_task_that_is_cancelled_while_it_waits_for_a_common_step_stops_nobody_else():
    engine = HeldEngine()
    shared = SharedEngine(engine)
    gone, kept = shared.inbox(), shared.inbox()
    gone.submit(request("gone", 1))
    kept.submit(request("kept", 2))

    async def one(inbox: Inbox) -> list[int]:
        ids: list[int] = []
        with inbox:
            while outputs := await inbox.receive_async():
                ids += [token_id for output in outputs for token_id in output.token_ids]
        return ids

    async def both() -> list[int]:
        tasks = [asyncio.create_task(one(inbox)) for inbox in (gone, kept)]
        await until(engine.is_in_step)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        engine.may_go_on.set()
        return await tasks[1]

    assert asyncio.run(both()) == expected(2)
    assert engine.stats().finished == {"abort": 1, "length": 1}


def test_a_task_that_is_cancelled_while_it_submits_leaves_no_request():
    engine = HeldEngine()
    shared = SharedEngine(engine)
    stays, leaves = shared.inbox(), shared.inbox()
    stays.submit(request("stays"))

    async def submit() -> None:
        with leaves:
            await asyncio.to_thread(leaves.submit, request("leaves", max_tokens=100))

    async def cancel_it() -> None:
        stepping = asyncio.create_task(stays.receive_async())
        await until(engine.is_in_step)
        # It waits for the step in a thread that nobody can cancel.
        submitting = asyncio.create_task(submit())
        await asyncio.sleep(0.05)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        engine.may_go_on.set()
        await stepping

    asyncio.run(cancel_it())
    receive_all(stays)
    assert not engine.has_work()
    assert engine.stats().finished == {"length": 1}


# Ends and errors


def test_one_request_of_an_inbox_can_be_ended(engine: FakeEngine):
    shared = SharedEngine(engine)
    with shared.inbox() as inbox:
        inbox.submit(request("a", 1))
        inbox.submit(request("b", 2))
        inbox.receive()
        inbox.abort("a")
        inbox.abort("never was")
        assert receive_all(inbox) == expected(2)[1:]
    assert engine.stats().finished == {"abort": 1, "length": 1}


def test_threads_and_the_tasks_of_two_loops_share_an_engine(engine: FakeEngine):
    shared = SharedEngine(engine)

    async def task(number: int) -> list[int]:
        ids: list[int] = []
        with shared.inbox() as inbox:
            await asyncio.to_thread(inbox.submit, request(f"r{number}", number))
            while outputs := await inbox.receive_async():
                ids += [token_id for output in outputs for token_id in output.token_ids]
        return ids

    async def tasks(first: int) -> list[list[int]]:
        return await asyncio.gather(*map(task, range(first, first + 5)))

    def loop(first: int) -> list[list[int]]:
        return asyncio.run(tasks(first))

    def thread(number: int) -> list[list[int]]:
        with shared.inbox() as inbox:
            inbox.submit(request(f"r{number}", number))
            return [receive_all(inbox)]

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(loop, 0), threads.submit(loop, 5)]
        running += [threads.submit(thread, 10), threads.submit(thread, 11)]
        found = [ids for one in running for ids in one.result(WAIT_SECONDS)]
    assert found == [expected(number) for number in range(12)]


def test_a_step_that_raises_does_so_for_all_tasks_that_wait_for_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    shared = SharedEngine(engine)

    def fail() -> list[TokenOutput]:
        raise RuntimeError("a bug")

    async def one(name: str) -> list[TokenOutput]:
        with shared.inbox() as inbox:
            inbox.submit(request(name))
            return await inbox.receive_async()

    async def both() -> list[object]:
        return [*await asyncio.gather(one("a"), one("b"), return_exceptions=True)]

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", fail)
        assert [str(error) for error in asyncio.run(both())] == ["a bug"] * 2
    # Both have left; who comes next runs.
    with shared.inbox() as inbox:
        inbox.submit(request("c", 3))
        assert receive_all(inbox) == expected(3)
    assert engine.stats().finished == {"abort": 2, "length": 1}


def test_close_waits_for_the_step_that_runs_and_ends_the_rest(engine: FakeEngine):
    shared = SharedEngine(engine)
    in_step, may_end = threading.Event(), threading.Event()
    step, closed_in_step = engine.step, []

    def slow_step() -> list[TokenOutput]:
        in_step.set()
        assert may_end.wait(30)
        outputs = step()
        closed_in_step.append(engine._closed)
        return outputs

    engine.step = slow_step

    def one(name: str) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        with shared.inbox() as inbox:
            inbox.submit(request(name, max_tokens=4000))
            while received := inbox.receive():
                outputs += received
        return outputs

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(one, f"r{number}") for number in range(3)]
        assert in_step.wait(30)
        closing = threads.submit(shared.close)
        may_end.set()
        closing.result(30)
        found = [future.result(30) for future in running if not _was_refused(future)]
    assert closed_in_step and not any(closed_in_step)
    assert found and all(outputs[-1].finish_reason == "abort" for outputs in found)
    shared.close()
    with shared.inbox() as inbox:
        with pytest.raises(ConfigError, match="this LLM is closed"):
            inbox.submit(request("late"))
        assert inbox.receive() == []


def _was_refused(future: Future[list[TokenOutput]]) -> bool:
    """Submitted after the close, as a thread may that starts late."""
    return isinstance(future.exception(30), ConfigError)
