"""POST /v1/completions, not streamed: exact answers, and what is refused."""

from typing import Any
from unittest.mock import ANY

import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    TestEngine,
    complete,
    run,
    serving,
    until,
)
from tests.support.tiny_tokenizer import ADDED_IDS, END_OF_TEXT_ID, END_OF_TURN_ID


def answer(tokenizer: Tokenizer, ids: list[int], **fields: Any) -> dict[str, Any]:
    response = complete(tokenizer, TestEngine(ids=ids), prompt="hello", **fields)
    assert response.status_code == 200, response.text
    return response.json()


def choice(tokenizer: Tokenizer, ids: list[int], **fields: Any) -> dict[str, Any]:
    (only,) = answer(tokenizer, ids, **fields)["choices"]
    return only


def test_the_whole_response(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("hello world"), END_OF_TURN_ID]
    assert answer(tokenizer, ids, model=MODEL_NAME) == {
        "id": ANY,
        "object": "text_completion",
        "created": ANY,
        "model": MODEL_NAME,
        "choices": [
            {
                "index": 0,
                "text": "hello world",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": END_OF_TURN_ID,
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
    }


def test_ids_are_new_and_created_is_now(tokenizer: Tokenizer):
    first, second = (answer(tokenizer, [1]) for _ in range(2))
    assert first["id"].startswith("cmpl-")
    assert first["id"] != second["id"]
    assert isinstance(first["created"], int)


def test_max_tokens_defaults_to_16_and_less_where_the_context_ends(tokenizer: Tokenizer):
    whole = complete(tokenizer, TestEngine(ids=[1]), prompt="hello").json()
    assert whole["usage"]["completion_tokens"] == 16
    assert whole["choices"][0]["finish_reason"] == "length"
    almost_full = [1] * (MAX_MODEL_LEN - 3)
    cut = complete(tokenizer, TestEngine(ids=[1]), prompt=almost_full).json()
    assert cut["usage"]["completion_tokens"] == 3


def test_max_tokens_is_honoured_up_to_the_last_token_of_the_context(tokenizer: Tokenizer):
    whole = complete(tokenizer, TestEngine(ids=[1]), prompt=[5], max_tokens=MAX_MODEL_LEN - 1)
    assert whole.json()["usage"]["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize("stop", ["lo wor", ["lo wor"], ["x", "zzz", "lo wor", "q"]])
def test_a_stop_string_over_token_borders_ends_the_text_before_it(tokenizer: Tokenizer, stop: Any):
    ids = tokenizer.encode("hello world and hello")
    only = choice(tokenizer, ids, stop=stop, max_tokens=50)
    assert only["text"] == "hel"
    assert (only["finish_reason"], only["stop_reason"]) == ("stop", "lo wor")


def test_a_false_start_of_a_stop_string_is_released(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("beta gamut"), END_OF_TURN_ID]
    assert choice(tokenizer, ids, stop=["beta gamma"])["text"] == "beta gamut"


def test_a_stop_string_aborts_the_request_in_the_engine(tokenizer: Tokenizer):
    engine = TestEngine(ids=tokenizer.encode("hello world"))

    async def exchange() -> None:
        async with serving(tokenizer, engine) as served:
            body = {"prompt": "a", "stop": "hello", "max_tokens": 90}
            response = await served.http.post("/v1/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == 1
            await until(lambda: served.thread.in_flight == 0)

    run(exchange())


@pytest.mark.parametrize("stop_id", [END_OF_TEXT_ID, END_OF_TURN_ID])
def test_either_end_token_stops(tokenizer: Tokenizer, stop_id: int):
    only = choice(tokenizer, [1, stop_id])
    assert (only["finish_reason"], only["stop_reason"]) == ("stop", stop_id)


def test_ignore_eos_runs_to_max_tokens(tokenizer: Tokenizer):
    only = choice(tokenizer, [1, END_OF_TURN_ID], ignore_eos=True, max_tokens=5)
    assert (only["finish_reason"], only["stop_reason"]) == ("length", None)


def test_stop_token_ids_stop_also_with_ignore_eos(tokenizer: Tokenizer):
    ids = [END_OF_TURN_ID, 7, 8]
    only = choice(tokenizer, ids, ignore_eos=True, stop_token_ids=[8], max_tokens=9)
    assert (only["finish_reason"], only["stop_reason"]) == ("stop", 8)


@pytest.mark.parametrize(("skip", "text"), [(True, "hello"), (False, "<|box_start|>hello")])
def test_skip_special_tokens(tokenizer: Tokenizer, skip: bool, text: str):
    ids = [ADDED_IDS["<|box_start|>"], *tokenizer.encode("hello"), END_OF_TURN_ID]
    assert choice(tokenizer, ids, skip_special_tokens=skip)["text"] == text


def test_logprobs_are_those_of_openai_completions(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("é hello"), END_OF_TURN_ID]
    next_text = [tokenizer.decode([i + 1], skip_special_tokens=False) for i in ids]
    texts = ["é", " ", "hello", "<|im_end|>"]
    assert choice(tokenizer, ids, logprobs=2)["logprobs"] == {
        "tokens": texts,
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {text: -0.5, other: -1.5} for text, other in zip(texts, next_text, strict=True)
        ],
        "text_offset": [0, 1, 2, 7],
    }


def test_prompts_of_text_and_of_ids_are_the_same(tokenizer: Tokenizer):
    text = "hello world and hello"
    ids = tokenizer.encode(text)
    answers = [
        complete(tokenizer, prompt=prompt, max_tokens=8).json() for prompt in (text, ids, [ids])
    ]
    assert len({whole["choices"][0]["text"] for whole in answers}) == 1
    assert {whole["usage"]["prompt_tokens"] for whole in answers} == {len(ids)}


@pytest.mark.parametrize("prompts", [["hello", "a", "b c"], [[1, 2], [3], [4, 5, 6]]])
def test_several_prompts_give_choices_in_their_order(
    tokenizer: Tokenizer, prompts: list[str] | list[list[int]]
):
    whole = complete(tokenizer, prompt=prompts, max_tokens=4).json()
    alone = [complete(tokenizer, prompt=prompt, max_tokens=4).json() for prompt in prompts]
    assert [only["index"] for only in whole["choices"]] == [0, 1, 2]
    assert [only["text"] for only in whole["choices"]] == [
        one["choices"][0]["text"] for one in alone
    ]
    for name, total in whole["usage"].items():
        assert total == sum(one["usage"][name] for one in alone)


def test_long_prompts_are_encoded_like_short_ones(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    prompts = ["hello world", "a"]
    inline = complete(tokenizer, prompt=prompts).json()
    monkeypatch.setattr("serve.completions.MAX_INLINE_CHARACTERS", 3)
    beside = complete(tokenizer, prompt=prompts).json()
    assert (inline["choices"], inline["usage"]) == (beside["choices"], beside["usage"])


def test_prompts_of_one_limit_share_their_checked_params(tokenizer: Tokenizer):
    engine = TestEngine(ids=[1])
    complete(tokenizer, engine, prompt=[[1], [2], [1] * 90], stop_token_ids=[5])
    first, second, third = (request.params for request in engine.submitted)
    assert first is second
    assert (first.max_tokens, third.max_tokens) == (16, 10)
    assert first.stop_token_ids == third.stop_token_ids == (5,)


@pytest.mark.parametrize(
    "fields",
    [
        # vllm bench serve
        {
            "model": MODEL_NAME,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
        # guidellm
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 4,
            "ignore_eos": True,
            "stop": None,
        },
        # lm-eval
        {"prompt": [[1, 2, 3]], "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234},
        # LangChain and the OpenAI SDKs
        {
            "seed": None,
            "logprobs": None,
            "n": 1,
            "best_of": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "echo": False,
            "suffix": None,
            "stop": ["\n\n"],
            "user": "someone",
            "stream_options": None,
        },
    ],
)
def test_what_real_clients_send_is_taken(tokenizer: Tokenizer, fields: dict[str, Any]):
    response = complete(tokenizer, **{"prompt": "hello", **fields})
    assert response.status_code == 200, response.text


def test_every_field_as_null_is_every_field_absent(tokenizer: Tokenizer):
    names = (
        "model max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos "
        "skip_special_tokens stream stream_options logprobs user n echo best_of logit_bias suffix"
    )
    nulls = dict.fromkeys(names.split())
    plain, with_nulls = (
        complete(tokenizer, prompt="hello", **fields).json() for fields in ({}, nulls)
    )
    assert with_nulls["choices"] == plain["choices"]


def test_token_logprob_is_the_very_number_of_the_top(tokenizer: Tokenizer):
    logprobs = choice(tokenizer, [1, 2, 3], logprobs=1, max_tokens=3)["logprobs"]
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]


def test_sampling_fields_reach_the_engine(tokenizer: Tokenizer):
    engine = TestEngine()
    sent = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -3,
        "max_tokens": 5,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "logprobs": 3,
        "skip_special_tokens": False,
    }
    complete(tokenizer, engine, prompt=[9, 8], stop="x", **sent)
    (submitted,) = engine.submitted
    assert submitted.prompt_token_ids == (9, 8)
    expected = {**sent, "stop": ("x",), "stop_token_ids": (4,)}
    assert {name: getattr(submitted.params, name) for name in expected} == expected
