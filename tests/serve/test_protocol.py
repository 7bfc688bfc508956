"""Fields by name: unknown, unsupported, missing and mistyped ones."""

from typing import Any

import pytest

from qwen35_jax.errors import InvalidRequestError
from serve.protocol import UNSUPPORTED_FIELDS, CompletionRequest, StreamOptions, parse_request


def refusal(body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(body, CompletionRequest)
    return caught.value


def test_a_request_is_parsed_with_defaults_for_absent_and_null_fields():
    parsed = parse_request({"prompt": "a", "top_k": None, "temperature": 0}, CompletionRequest)
    assert parsed == CompletionRequest(prompt="a", temperature=0.0)


def test_nulls_inside_stream_options_are_absent_too():
    body = {"prompt": "a", "stream_options": {"include_usage": None}}
    assert parse_request(body, CompletionRequest).stream_options == StreamOptions()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "; did you mean 'temperature'?"),
        ("max_token", "; did you mean 'max_tokens'?"),
        ("presence_penality", "; did you mean 'presence_penalty'?"),
        ("messages", ""),
        ("x" * 100_000, ""),
    ],
)
@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_field_is_named_with_the_nearest_known_one(name: str, hint: str, value: Any):
    error = refusal({"prompt": "a", name: value})
    assert str(error) == f"unknown field {name!r}{hint}"
    assert (error.param, error.code) == (name[:64], "unknown_field")


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_an_unsupported_field_passes_as_null_and_is_refused_by_name(name: str):
    parse_request({"prompt": "a", name: None}, CompletionRequest)
    error = refusal({"prompt": "a", name: "something"})
    assert (error.param, error.code) == (name, "unsupported_field")
    assert str(error).startswith(f"{name} is not supported")


@pytest.mark.parametrize(
    ("name", "neutral"),
    [(name, value) for name, values in UNSUPPORTED_FIELDS.items() for value in values],
)
def test_an_unsupported_field_passes_with_a_neutral_value(name: str, neutral: object):
    parsed = parse_request({"prompt": "a", name: neutral}, CompletionRequest)
    assert parsed == CompletionRequest(prompt="a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 0),
        ("echo", True),
        ("echo", 0),
        ("suffix", "end"),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 100}),
        ("min_tokens", 1),
        ("prompt_logprobs", 0),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_other_values_of_an_unsupported_field_are_refused(name: str, value: Any):
    assert refusal({"prompt": "a", name: value}).param == name


def test_a_neutral_value_is_offered():
    assert str(refusal({"prompt": "a", "n": 2})) == "n is not supported; leave it out or send 1"


def test_a_missing_field_is_named():
    error = refusal({})
    assert (str(error), error.param) == ("prompt is required", "prompt")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", "5", "max_tokens: expected integer, got string"),
        ("ignore_eos", 0, "ignore_eos: expected boolean, got integer"),
        ("temperature", [], "temperature: expected number, got array"),
        ("stop", ["a", 1], "stop[1]: expected string, got integer"),
        (
            "stream_options",
            {"usage": 1},
            "stream_options: object contains unknown field usage",
        ),
        (
            "stream_options",
            {"include_usage": 1},
            "stream_options.include_usage: expected boolean, got integer",
        ),
    ],
)
def test_a_wrong_type_is_told_in_the_words_of_json(field: str, value: Any, message: str):
    error = refusal({"prompt": "a", field: value})
    assert (str(error), error.param) == (message, field)
