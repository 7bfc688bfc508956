"""Streams: exact events, one write each, and comments while there is nothing to say."""

import asyncio
from typing import Any
from unittest.mock import ANY

import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import (
    MODEL_NAME,
    RawExchange,
    TestEngine,
    complete,
    events_of,
    run,
    serving,
    until,
)
from tests.support.tiny_tokenizer import END_OF_TURN_ID

MULTILINGUAL = "ďábelské 🔥👩‍👩‍👧 你好 ไทย"


def stream(tokenizer: Tokenizer, ids: list[int], **fields: Any) -> list[Any]:
    response = complete(tokenizer, TestEngine(ids=ids), prompt="hello", stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    return events_of(response.text)


def chunk(text: str, finish_reason: str | None = None, stop_reason: Any = None) -> dict[str, Any]:
    return {
        "id": ANY,
        "object": "text_completion",
        "created": ANY,
        "model": MODEL_NAME,
        "choices": [
            {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
            }
        ],
    }


def joined(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events[:-1])


def test_a_stream_without_usage(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("hello world"), END_OF_TURN_ID]
    events = stream(tokenizer, ids)
    assert events == [
        chunk("hello"),
        chunk(" world"),
        chunk("", "stop", END_OF_TURN_ID),
        "[DONE]",
    ]
    assert len({event["id"] for event in events[:-1]}) == 1


def test_include_usage_is_null_on_chunks_and_then_one_chunk_without_choices(tokenizer: Tokenizer):
    ids = tokenizer.encode("hello world")
    events = stream(tokenizer, ids, max_tokens=2, stream_options={"include_usage": True})
    assert events == [
        {**chunk("hello"), "usage": None},
        {**chunk(" world", "length"), "usage": None},
        {
            **chunk(""),
            "choices": [],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        },
        "[DONE]",
    ]


def test_continuous_usage_counts_up_in_every_chunk(tokenizer: Tokenizer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(tokenizer, [1, 2, 3], max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 3]


def test_continuous_usage_alone_brings_no_last_chunk(tokenizer: Tokenizer):
    options = {"continuous_usage_stats": True}
    events = stream(tokenizer, [1, 2], max_tokens=2, stream_options=options)
    assert [len(event["choices"]) for event in events[:-1]] == [1, 1]


def test_unknown_stream_options_are_refused(tokenizer: Tokenizer):
    response = complete(tokenizer, prompt="a", stream=True, stream_options={"usage": True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "stream_options"
    assert "usage" in error["message"]


@pytest.mark.parametrize("max_tokens", [None, 5, 20, 31])
def test_the_stream_equals_the_whole_answer(tokenizer: Tokenizer, max_tokens: int | None):
    ids = [*tokenizer.encode(MULTILINGUAL), END_OF_TURN_ID]
    fields = {"max_tokens": max_tokens or len(ids)}
    whole = complete(tokenizer, TestEngine(ids=ids), prompt="hello", **fields).json()
    events = stream(tokenizer, ids, **fields)
    assert joined(events) == whole["choices"][0]["text"]
    assert "\ufffd" not in joined(events)
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    if max_tokens is None:
        assert joined(events) == MULTILINGUAL


def test_a_stop_string_never_shows_and_a_false_start_does(tokenizer: Tokenizer):
    ids = tokenizer.encode("beta gamut beta gamma and")
    events = stream(tokenizer, ids, stop=["beta gamma"], max_tokens=60)
    assert joined(events) == "beta gamut "
    last = events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "beta gamma")
    assert [event for event in events[:-2] if event["choices"][0]["finish_reason"]] == []


def test_logprobs_of_chunks_are_those_of_the_whole_answer(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("é你 hello"), END_OF_TURN_ID]
    whole = complete(tokenizer, TestEngine(ids=ids), prompt="hello", logprobs=2).json()
    parts = [event["choices"][0]["logprobs"] for event in stream(tokenizer, ids, logprobs=2)[:-1]]
    for name, values in whole["choices"][0]["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values
        assert len(values) == len(ids)


def test_chunks_of_several_prompts_carry_their_index(tokenizer: Tokenizer):
    fields = {"prompt": ["hello", "a", "b c"], "max_tokens": 4}
    whole = complete(tokenizer, **fields).json()
    options = {"include_usage": True}
    response = complete(tokenizer, stream=True, stream_options=options, **fields)
    *chunks, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    for expected in whole["choices"]:
        mine = [
            each["choices"][0]
            for each in chunks
            if each["choices"][0]["index"] == expected["index"]
        ]
        assert "".join(part["text"] for part in mine) == expected["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["length"]


def test_each_event_is_one_write_and_headers_come_first(tokenizer: Tokenizer):
    async def exchange() -> RawExchange:
        async with serving(tokenizer, TestEngine(ids=[1])) as served:
            raw = RawExchange(served.app, {"prompt": "a", "max_tokens": 3, "stream": True})
            await raw.run()
            return raw

    start, *bodies, end = run(exchange()).sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert all(body["more_body"] for body in bodies)
    assert [body["body"].count(b"\n\n") for body in bodies] == [1] * 4
    assert all(
        body["body"].startswith(b"data: ") and body["body"].endswith(b"\n\n") for body in bodies
    )
    assert (end["body"], end["more_body"]) == (b"", False)


def test_a_stream_that_waits_has_its_headers_and_comments(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1], seconds_per_step=0.01, max_num_seqs=1)

    async def exchange() -> None:
        async with serving(tokenizer, engine, keep_alive_seconds=0.02) as served:
            body = {"prompt": "a", "max_tokens": 90, "stream": True}
            running, waiting = RawExchange(served.app, body), RawExchange(served.app, body)
            tasks = [asyncio.create_task(running.run())]
            await until(lambda: engine.running_count == 1)
            tasks.append(asyncio.create_task(waiting.run()))
            await waiting.wait_for_messages(3)
            assert waiting.sent[0]["type"] == "http.response.start"
            assert {body["body"] for body in waiting.sent[1:]} == {b": waiting\n\n"}
            running.leave()
            waiting.leave()
            await asyncio.gather(*tasks)

    run(exchange())


def test_a_stream_that_flows_has_no_comments(tokenizer: Tokenizer):
    async def exchange() -> RawExchange:
        engine = TestEngine(ids=[1], seconds_per_step=0.002)
        async with serving(tokenizer, engine, keep_alive_seconds=0.1) as served:
            raw = RawExchange(served.app, {"prompt": "a", "max_tokens": 90, "stream": True})
            await raw.run()
            return raw

    assert not any(b": waiting" in body["body"] for body in run(exchange()).sent[1:])


def test_a_cancelled_stream_frees_its_request(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1], seconds_per_step=0.02)

    async def exchange() -> None:
        async with serving(tokenizer, engine) as served:
            raw = RawExchange(served.app, {"prompt": "a", "max_tokens": 90, "stream": True})
            task = asyncio.create_task(raw.run())
            await raw.wait_for_messages(2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: served.thread.in_flight == 0)
            assert engine.steps < 60

    run(exchange())


def test_a_stream_whose_headers_cannot_be_sent_frees_its_request(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1], seconds_per_step=0.02)

    async def exchange() -> None:
        async with serving(tokenizer, engine) as served:
            raw = RawExchange(served.app, {"prompt": "a", "max_tokens": 90, "stream": True})

            async def broken_send(message: Any) -> None:
                raise OSError("the connection is gone")

            raw._send = broken_send
            with pytest.raises(OSError, match="gone"):
                await raw.run()
            await until(lambda: served.thread.in_flight == 0)
            assert engine.steps < 60

    run(exchange())
