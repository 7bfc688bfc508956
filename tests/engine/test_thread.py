"""The engine's thread: who gets which outputs, and that nobody waits for ever."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qwen35_jax.engine.fake import FakeEngine, hashed_id
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import MAX_ERROR_CHARACTERS, EngineError, EngineThread
from qwen35_jax.errors import ConfigError, InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from tests.support.processes import wait_until

VOCABULARY_SIZE = 320
WAIT_SECONDS = 10


def request(request_id: str = "a", prompt: tuple[int, ...] = (1, 2), **params: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(**params))


class Receiver:
    """Collects a request's outputs."""

    def __init__(self, on_output: Callable[[TokenOutput], None] = lambda output: None):
        self.outputs: list[TokenOutput] = []
        self.started = threading.Event()
        self._ended = threading.Event()
        self._on_output = on_output

    def __call__(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        self.started.set()
        if output.finish_reason is not None:
            self._ended.set()
        self._on_output(output)

    def wait(self) -> TokenOutput:
        assert self._ended.wait(WAIT_SECONDS), "the request never ended"
        return self.outputs[-1]

    @property
    def ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]


class CountingEngine(FakeEngine):
    """Counts steps and looks, raises in the step that it is told to, and notes its close."""

    def __init__(self, *, error: BaseException | None = None, fails_at: int = 0, **options: Any):
        super().__init__(vocabulary_size=VOCABULARY_SIZE, **options)
        self.steps = 0
        self.looks = 0
        self.closes = 0
        self.threads: set[int] = set()
        self._error = error
        self._fails_at = fails_at

    def has_work(self) -> bool:
        self.looks += 1
        self.threads.add(threading.get_ident())
        return super().has_work()

    def step(self) -> list[TokenOutput]:
        self.steps += 1
        self.threads.add(threading.get_ident())
        if self._error is not None and self.steps >= self._fails_at:
            raise self._error
        return super().step()

    def submit(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        super().submit(request)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closes += 1
        super().close()


def test_each_receiver_gets_the_outputs_of_its_request():
    receivers = {name: Receiver() for name in "abc"}
    with EngineThread(CountingEngine(max_num_seqs=2)) as thread:
        for place, (name, receiver) in enumerate(receivers.items()):
            thread.submit(request(name, (7, place), max_tokens=5), receiver)
        for place, receiver in enumerate(receivers.values()):
            assert receiver.wait().finish_reason == "length"
            expected = [hashed_id((7, place), step, VOCABULARY_SIZE) for step in range(5)]
            assert receiver.ids == expected
        assert thread.in_flight == 0


def test_the_engine_is_touched_by_one_thread_that_is_not_the_callers():
    engine = CountingEngine()
    with EngineThread(engine) as thread:
        receiver = Receiver()
        thread.submit(request(), receiver)
        receiver.wait()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_requests_from_many_threads_all_end():
    receivers = [Receiver() for _ in range(40)]
    with EngineThread(CountingEngine(max_num_seqs=4)) as thread:
        submitters = [
            threading.Thread(
                target=thread.submit, args=(request(str(number), max_tokens=3), receiver)
            )
            for number, receiver in enumerate(receivers)
        ]
        for submitter in submitters:
            submitter.start()
        for submitter in submitters:
            submitter.join(WAIT_SECONDS)
        assert {receiver.wait().finish_reason for receiver in receivers} == {"length"}


def test_a_refusal_reaches_the_submitter_and_nothing_runs():
    with EngineThread(CountingEngine()) as thread:
        receiver = Receiver()
        with pytest.raises(InvalidRequestError, match="at least one token"):
            thread.submit(request(prompt=()), receiver)
        assert thread.in_flight == 0
        assert receiver.outputs == []


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    with EngineThread(CountingEngine(seconds_per_step=0.001)) as thread:
        first, second = Receiver(), Receiver()
        thread.submit(request("same", max_tokens=1000), first)
        with pytest.raises(InvalidRequestError, match="'same' is in use"):
            thread.submit(request("same"), second)
        thread.abort("same")
        first.wait()
        thread.submit(request("same", max_tokens=1), second)
        assert second.wait().finish_reason == "length"


def test_abort_ends_a_request_and_frees_it_in_the_engine():
    engine = CountingEngine(seconds_per_step=0.001)
    with EngineThread(engine) as thread:
        receiver = Receiver()
        thread.submit(request(max_tokens=4000), receiver)
        thread.abort("a")
        thread.abort("unknown")
        assert receiver.wait() == TokenOutput("a", finish_reason="abort")
        assert engine.running_count == thread.in_flight == 0


def test_a_receiver_that_raises_loses_its_request_only(caplog: pytest.LogCaptureFixture):
    def fail(output: TokenOutput) -> None:
        raise RuntimeError("a receiver's bug")

    engine = CountingEngine(seconds_per_step=0.001)
    with EngineThread(engine) as thread:
        bad, good = Receiver(fail), Receiver()
        thread.submit(request("bad", max_tokens=4000), bad)
        thread.submit(request("good", max_tokens=20), good)
        assert good.wait().finish_reason == "length"
        assert len(bad.outputs) == 1
        assert engine.running_count == thread.in_flight == 0
        assert thread.failure is None
    assert "a receiver's bug" in caplog.text


def test_a_failed_step_ends_every_request_and_refuses_later_ones():
    engine = CountingEngine(error=RuntimeError("out of memory\nand pages of detail"), fails_at=2)
    with EngineThread(engine) as thread:
        receivers = [Receiver(), Receiver()]
        accepted = [
            thread.submit_soon(request(str(number)), receiver)
            for number, receiver in enumerate(receivers)
        ]
        message = "the engine failed: RuntimeError: out of memory"
        for place, receiver in enumerate(receivers):
            if accepted[place].exception(WAIT_SECONDS) is None:
                last = receiver.wait()
                assert (last.finish_reason, last.error) == ("error", message)
        with pytest.raises(EngineError, match=message):
            thread.submit(request("late"), Receiver())
        assert str(thread.failure) == message
        assert isinstance(thread.failure and thread.failure.__cause__, RuntimeError)
        assert not thread.is_running
        thread.abort("late")
    assert engine.closes == 1


def test_a_failure_wakes_submitters_that_wait():
    release = threading.Event()

    class BlockedEngine(CountingEngine):
        def step(self) -> list[TokenOutput]:
            release.wait(WAIT_SECONDS)
            raise SystemExit

    with EngineThread(BlockedEngine()) as thread:
        thread.submit(request("a"), Receiver())
        waiting = thread.submit_soon(request("b"), Receiver())
        release.set()
        assert isinstance(waiting.exception(WAIT_SECONDS), EngineError)


def test_the_text_of_a_failure_is_short():
    with EngineThread(CountingEngine(error=RuntimeError("x" * 10_000))) as thread:
        receiver = Receiver()
        thread.submit(request(), receiver)
        assert len(receiver.wait().error or "") == MAX_ERROR_CHARACTERS


def test_an_idle_thread_sleeps():
    engine = CountingEngine()
    with EngineThread(engine) as thread:
        receiver = Receiver()
        thread.submit(request(max_tokens=1), receiver)
        receiver.wait()
        threading.Event().wait(0.05)
        before = (engine.steps, engine.looks)
        threading.Event().wait(0.1)
        assert (engine.steps, engine.looks) == before


def test_a_receiver_may_submit_and_abort():
    with EngineThread(CountingEngine()) as thread:
        second = Receiver()

        def submit_next(output: TokenOutput) -> None:
            thread.submit(request("second", max_tokens=2), second)
            thread.abort("first")

        thread.submit(request("first", max_tokens=1), Receiver(submit_next))
        assert second.wait().finish_reason == "length"


def test_close_aborts_what_is_in_flight_and_closes_the_engine_once():
    engine = CountingEngine(seconds_per_step=0.001)
    thread = EngineThread(engine)
    receiver = Receiver()
    thread.submit(request(max_tokens=4000), receiver)
    receiver.started.wait(WAIT_SECONDS)
    thread.close()
    thread.close()
    assert receiver.wait().finish_reason == "abort"
    assert engine.closes == 1
    assert thread.failure is None
    with pytest.raises(EngineError, match="the engine is closed"):
        thread.submit(request("late"), Receiver())


def test_a_withdrawn_submission_never_runs():
    release = threading.Event()

    class BlockedEngine(CountingEngine):
        def step(self) -> list[TokenOutput]:
            release.wait(WAIT_SECONDS)
            return super().step()

    with EngineThread(BlockedEngine()) as thread:
        running, withdrawn, later = Receiver(), Receiver(), Receiver()
        thread.submit(request("running", max_tokens=1), running)
        assert thread.submit_soon(request("withdrawn"), withdrawn).cancel()
        accepted = thread.submit_soon(request("later", max_tokens=1), later)
        release.set()
        accepted.result(WAIT_SECONDS)
        assert later.wait().finish_reason == "length"
        assert withdrawn.outputs == []


@pytest.mark.parametrize(("aborted", "reason"), [(True, "abort"), (False, "error")])
def test_a_request_that_the_engine_forgot_still_ends(aborted: bool, reason: str):
    class ForgetfulEngine(CountingEngine):
        def abort(self, request_id: str) -> None:
            self.close()

        def step(self) -> list[TokenOutput]:
            if not aborted:
                self.close()
            return []

    with EngineThread(ForgetfulEngine()) as thread:
        receiver = Receiver()
        thread.submit(request(max_tokens=4000), receiver)
        if aborted:
            thread.abort("a")
        assert receiver.wait().finish_reason == reason


def test_a_forgotten_close_does_not_keep_the_program_from_ending():
    program = """
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.engine.thread import EngineThread
from qwen35_jax.sampling_params import SamplingParams
thread = EngineThread(FakeEngine(vocabulary_size=9, seconds_per_step=0.01))
params = SamplingParams(max_tokens=4000)
thread.submit(Request("a", (1,), params), lambda output: output.finish_reason and print(output))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=30, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "finish_reason='abort'" in done.stdout


def test_work_that_no_step_moves_counts_as_stuck_until_one_does():
    release = threading.Semaphore(0)

    class GatedEngine(CountingEngine):
        def step(self) -> list[TokenOutput]:
            assert release.acquire(timeout=WAIT_SECONDS)
            return super().step()

    with EngineThread(GatedEngine(), stuck_after_seconds=0.05) as thread:
        threading.Event().wait(0.1)
        assert thread.stuck_for == 0
        receiver = Receiver()
        thread.submit(request(max_tokens=2), receiver)
        wait_until(lambda: thread.stuck_for >= thread.stuck_after_seconds)
        before = thread.stuck_for
        release.release()
        wait_until(lambda: thread.stuck_for < before)
        release.release()
        receiver.wait()
        wait_until(lambda: thread.stuck_for == 0)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "1"])
def test_seconds_that_nothing_can_be_stuck_for_are_refused(seconds: Any):
    with pytest.raises(ConfigError, match="stuck_after_seconds must be a positive number"):
        EngineThread(CountingEngine(), stuck_after_seconds=seconds)


def test_an_interrupt_before_the_thread_has_started_leaves_an_exit_that_goes_well(
    monkeypatch: pytest.MonkeyPatch,
):
    at_exit: list[Callable[[], None]] = []

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EngineThread(FakeEngine(vocabulary_size=9))
    (close,) = at_exit
    close()
