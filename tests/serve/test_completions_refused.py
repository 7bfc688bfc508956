"""POST /v1/completions: what is refused, what fails, and clients that leave."""

import asyncio
from typing import Any

import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import (
    MAX_MODEL_LEN,
    RawExchange,
    TestEngine,
    complete,
    error_of,
    events_of,
    run,
    serving,
    until,
)
from tests.support.tiny_tokenizer import VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([""], "prompt[0] is empty"),
        ([[]], "prompt[0] is empty"),
        (["a", ""], "prompt[1] is empty"),
        ([[1], []], "prompt[1] is empty"),
        ([VOCABULARY_SIZE], f"prompt: token id {VOCABULARY_SIZE} is not in [0, {VOCABULARY_SIZE})"),
        ([1, -1], f"prompt: token id -1 is not in [0, {VOCABULARY_SIZE})"),
        ([[1], [10**30]], f"prompt[1]: token id {10**30} is not in"),
        (["a", 1], "prompt must hold only strings, only token ids or only lists"),
        ([[1], 1], "prompt must hold only strings, only token ids or only lists"),
        ([1.5], "prompt[0]: expected"),
        ([True], "prompt[0]: expected"),
        ([["a"]], "prompt[0][0]: expected integer, got string"),
        (3, "prompt: expected"),
        ({"a": 1}, "prompt: expected"),
        (None, "prompt is required"),
    ],
)
def test_bad_prompts_are_refused_by_name(tokenizer: Tokenizer, prompt: Any, message: str):
    response = complete(tokenizer, prompt=prompt)
    assert response.status_code == 400
    error = error_of(response)
    assert error["message"].startswith(message)
    assert (error["param"], error["type"]) == ("prompt", "invalid_request_error")


def test_a_bad_prompt_leaves_a_running_request_alone(tokenizer: Tokenizer):
    async def exchange() -> None:
        async with serving(tokenizer, TestEngine(ids=[1], seconds_per_step=0.002)) as served:
            good = served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 30})
            task = asyncio.create_task(good)
            await until(lambda: served.thread.in_flight == 1)
            bad = await served.http.post("/v1/completions", json={"prompt": [[]]})
            assert bad.status_code == 400
            assert (await task).json()["usage"]["completion_tokens"] == 30

    run(exchange())


def test_a_prompt_over_the_context_names_both_numbers(tokenizer: Tokenizer):
    response = complete(tokenizer, prompt=[1] * 150)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "150" in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize("prompt", ["x" * 10_000, ["a", "x" * 10_000], "é" * 5_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, prompt: Any
):
    def encode(self: Tokenizer, text: str) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    response = complete(tokenizer, prompt=prompt)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert f"more than {MAX_MODEL_LEN} tokens" in error["message"]


def test_a_long_text_of_few_tokens_is_taken(tokenizer: Tokenizer):
    text = "<tts_text_bos_single>" * (MAX_MODEL_LEN - 1)
    response = complete(tokenizer, prompt=text, max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_too_many_prompts_are_refused(tokenizer: Tokenizer, prompt: Any):
    assert complete(tokenizer, prompt=[prompt] * 2048, max_tokens=1).status_code == 200
    response = complete(tokenizer, prompt=[prompt] * 2049, max_tokens=1)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("prompt", "too_many_prompts")
    assert "at most 2048" in error["message"]


def test_max_tokens_over_the_context_names_all_numbers(tokenizer: Tokenizer):
    response = complete(tokenizer, prompt=[1] * 30, max_tokens=71)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    for number in ("30", "71", str(MAX_MODEL_LEN), "at most 70"):
        assert number in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [VOCABULARY_SIZE]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
        ("stream", "yes"),
        ("stream_options", 3),
        ("stream_options", {"include_usage": True}),
        ("user", 3),
        ("model", 3),
    ],
)
def test_values_of_a_wrong_type_or_range_are_refused_by_name(
    tokenizer: Tokenizer, field: str, value: Any
):
    response = complete(tokenizer, prompt="hello", **{field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == field
    assert field in error["message"]


def test_an_engine_failure_is_a_500_and_later_requests_get_503(tokenizer: Tokenizer):
    async def exchange() -> None:
        async with serving(tokenizer, TestEngine(ids=[1], fails_at_step=3)) as served:
            body = {"prompt": "a", "max_tokens": 30}
            first = await served.http.post("/v1/completions", json=body)
            assert first.status_code == 500
            assert error_of(first) == {
                "message": "the engine failed: RuntimeError: the device is gone",
                "type": "server_error",
                "param": None,
                "code": "engine_error",
            }
            later = await served.http.post("/v1/completions", json=body)
            assert later.status_code == 503
            assert error_of(later)["code"] == "engine_unavailable"
            streamed = await served.http.post("/v1/completions", json={**body, "stream": True})
            assert streamed.status_code == 503

    run(exchange())


def test_an_engine_failure_in_a_stream_is_one_event_and_its_end(tokenizer: Tokenizer):
    response = complete(
        tokenizer, TestEngine(ids=[1], fails_at_step=3), prompt="a", max_tokens=30, stream=True
    )
    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert all(chunk["choices"] for chunk in chunks)
    assert last == {
        "error": {
            "message": "the engine failed: RuntimeError: the device is gone",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
    }


def test_an_id_outside_the_vocabulary_is_the_engines_failure(tokenizer: Tokenizer):
    whole, streamed = (
        complete(tokenizer, TestEngine(ids=[1, VOCABULARY_SIZE]), prompt="a", stream=stream)
        for stream in (False, True)
    )
    assert whole.status_code == 500
    assert error_of(whole)["code"] == "engine_error"
    assert events_of(streamed.text)[-1] == whole.json()


def test_a_refusal_of_the_engine_is_a_400(tokenizer: Tokenizer):
    engine = TestEngine(max_model_len=5)
    response = complete(tokenizer, engine, prompt=[1] * 9, stream=True)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_leaves_frees_its_requests(tokenizer: Tokenizer, stream: bool, waiting: bool):
    engine = TestEngine(ids=[1], seconds_per_step=0.01, max_num_seqs=1)

    async def exchange() -> None:
        async with serving(tokenizer, engine) as served:
            body = {"prompt": ["a", "b"], "max_tokens": 90, "stream": stream}
            tasks = []
            if waiting:
                blocker = RawExchange(served.app, {**body, "prompt": "a"})
                tasks.append(asyncio.create_task(blocker.run()))
                await until(lambda: engine.running_count == 1)
            leaver = RawExchange(served.app, body)
            leaving = asyncio.create_task(leaver.run())
            await until(lambda: engine.waiting_count == (2 if waiting else 1))
            leaver.leave()
            await leaving
            await until(lambda: served.thread.in_flight == int(waiting))
            assert (engine.running_count, engine.waiting_count) == (int(waiting), 0)
            await asyncio.gather(*tasks)

    run(exchange())
