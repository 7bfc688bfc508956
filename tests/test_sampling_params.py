"""SamplingParams takes what it documents and refuses everything else by name."""

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    SamplingParams,
)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 2.5},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 1},
        {"top_k": 2**31 - 1},
        {"seed": None},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"logprobs": None},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
        {"stop": None},
        {"stop": []},
        {"stop": ["a"] * MAX_STOP_STRINGS},
        {"stop": "\n"},
        {"stop_token_ids": None},
        {"stop_token_ids": [0, 5]},
        {"ignore_eos": True},
        {"skip_special_tokens": False},
        {"n": 1},
        {"n": MAX_N},
        {"min_tokens": 0},
        {"min_tokens": 16},
        {"min_tokens": 10**6, "max_tokens": None},
        {"presence_penalty": -2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 100},
        {"logit_bias": None},
        {"logit_bias": {}},
        {"logit_bias": {5: -100, "7": 100.0}},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), 1)},
        {"prompt_logprobs": None},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": MAX_LOGPROBS},
    ],
    ids=str,
)
def test_documented_values_are_taken(options: dict[str, Any]) -> None:
    SamplingParams(**options)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("temperature", -0.1, r"in \[0, inf\)"),
        ("temperature", math.nan, r"a number in \[0, inf\)"),
        ("temperature", math.inf, r"a number in \[0, inf\)"),
        ("temperature", 10**400, r"a number in \[0, inf\)"),
        ("temperature", -(10**400), r"a number in \[0, inf\)"),
        ("temperature", "1", r"a number in \[0, inf\)"),
        ("temperature", True, r"a number in \[0, inf\)"),
        ("temperature", None, r"a number in \[0, inf\)"),
        ("top_p", 0, r"in \(0, 1\]"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.0001, r"in \(0, 1\]"),
        ("top_p", -1, r"in \(0, 1\]"),
        ("top_p", math.nan, r"a number in \(0, 1\]"),
        ("top_p", None, r"a number in \(0, 1\]"),
        ("min_p", -0.1, r"in \[0, 1\]"),
        ("min_p", 1.1, r"in \[0, 1\]"),
        ("min_p", [0.5], r"a number in \[0, 1\]"),
        ("top_k", -2, "an integer from -1 to 2147483647"),
        ("top_k", 2**31, "an integer from -1 to 2147483647"),
        ("top_k", 2.0, "an integer from -1"),
        ("top_k", False, "an integer from -1"),
        ("top_k", None, "an integer from -1"),
        ("seed", 2**63, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("seed", -(2**63) - 1, "an integer from -9223372036854775808"),
        ("seed", 1.5, "an integer from"),
        ("seed", True, "an integer from"),
        ("max_tokens", 0, "an integer of at least 1"),
        ("max_tokens", -5, "an integer of at least 1"),
        ("max_tokens", 16.0, "an integer of at least 1"),
        ("max_tokens", "16", "an integer of at least 1"),
        ("logprobs", -1, "an integer from 0 to 20"),
        ("logprobs", MAX_LOGPROBS + 1, "an integer from 0 to 20"),
        ("logprobs", True, "an integer from 0 to 20"),
        ("n", 0, "an integer from 1 to 128"),
        ("n", MAX_N + 1, "an integer from 1 to 128"),
        ("n", 2.0, "an integer from 1 to 128"),
        ("n", None, "an integer from 1 to 128"),
        ("min_tokens", -1, "an integer from 0 to 2147483647"),
        ("min_tokens", 1.5, "an integer from 0"),
        ("min_tokens", 17, "at most max_tokens, 16"),
        ("presence_penalty", -2.01, r"in \[-2, 2\]"),
        ("presence_penalty", 2.01, r"in \[-2, 2\]"),
        ("presence_penalty", math.nan, r"a number in \[-2, 2\]"),
        ("frequency_penalty", 2.5, r"in \[-2, 2\]"),
        ("frequency_penalty", "1", r"a number in \[-2, 2\]"),
        ("frequency_penalty", None, r"a number in \[-2, 2\]"),
        ("repetition_penalty", 0, r"in \(0, inf\)"),
        ("repetition_penalty", -1.0, r"in \(0, inf\)"),
        ("repetition_penalty", math.inf, r"a number in \(0, inf\)"),
        ("repetition_penalty", True, r"a number in \(0, inf\)"),
        ("prompt_logprobs", -1, "an integer from 0 to 20"),
        ("prompt_logprobs", MAX_LOGPROBS + 1, "an integer from 0 to 20"),
        ("prompt_logprobs", True, "an integer from 0 to 20"),
        ("logit_bias", 5, "a list"),
        ("logit_bias", "5", "a list"),
        ("logit_bias", [5], "a mapping from token ids to numbers"),
        ("logit_bias", [(1, 2, 3)], "a mapping from token ids to numbers"),
        ("stop", "", "non-empty strings"),
        ("stop", ["a", ""], "non-empty strings"),
        ("stop", ["a", 5], "non-empty strings"),
        ("stop", [None], "non-empty strings"),
        ("stop", b"end", "a list"),
        ("stop", {"a": 1}, "a list"),
        ("stop", 5, "a list"),
        ("stop_token_ids", 5, "a list"),
        ("stop_token_ids", "5", "a list"),
        ("stop_token_ids", [-1], "an integer from 0 to 2147483647"),
        ("stop_token_ids", [2**31], "an integer from 0 to 2147483647"),
        ("stop_token_ids", [1.0], "an integer from 0"),
        ("stop_token_ids", [True], "an integer from 0"),
        ("ignore_eos", 1, "true or false"),
        ("ignore_eos", None, "true or false"),
        ("skip_special_tokens", "yes", "true or false"),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_and_value(
    field: str, value: Any, wanted: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} must be {wanted}") as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field
    message = str(raised.value)
    assert "\n" not in message
    offender = value[-1] if isinstance(value, list) and field != "min_p" else value
    assert message.endswith(f"not {offender!r}")


def test_too_many_stop_strings_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"^stop must be at most 16 strings, not 17$"):
        SamplingParams(stop=["a"] * 17)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("a", 1, "a token id must be an integer from 0 to 2147483647, not 'a'"),
        ("", 1, "a token id must be an integer from 0 to 2147483647, not ''"),
        ("-1", 1, "a token id must be an integer from 0 to 2147483647, not '-1'"),
        ("1.0", 1, "a token id must be an integer from 0 to 2147483647, not '1.0'"),
        ("1_0", 1, "a token id must be an integer from 0 to 2147483647, not '1_0'"),
        (" 1", 1, "a token id must be an integer from 0 to 2147483647, not ' 1'"),
        ("１", 1, "a token id must be an integer from 0 to 2147483647, not '１'"),
        ("9" * 99, 1, f"a token id must be an integer from 0 to 2147483647, not '{'9' * 99}'"),
        ("2147483648", 1, "a token id must be an integer from 0 to 2147483647, not 2147483648"),
        (-1, 1, "a token id must be an integer from 0 to 2147483647, not -1"),
        (1.0, 1, "a token id must be an integer from 0 to 2147483647, not 1.0"),
        (True, 1, "a token id must be an integer from 0 to 2147483647, not True"),
        ("5", "1", "the bias of 5 must be a number in [-100, 100], not '1'"),
        (5, None, "the bias of 5 must be a number in [-100, 100], not None"),
        (5, True, "the bias of 5 must be a number in [-100, 100], not True"),
        (5, math.nan, "the bias of 5 must be a number in [-100, 100], not nan"),
        (5, -math.inf, "the bias of 5 must be a number in [-100, 100], not -inf"),
        (5, 1e9, "the bias of 5 must be in [-100, 100], not 1000000000.0"),
        (5, 100.001, "the bias of 5 must be in [-100, 100], not 100.001"),
        (5, -101, "the bias of 5 must be in [-100, 100], not -101"),
    ],
)
def test_a_wrong_bias_is_refused_with_its_token(key: Any, value: Any, wanted: str):
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(logit_bias={3: 0.0, key: value})
    assert str(raised.value) == f"logit_bias: {wanted}"
    assert raised.value.param == "logit_bias"


def test_biases_are_kept_as_pairs_by_id():
    params = SamplingParams(logit_bias={"12": 1, 5: -0.5, np.int64(7): np.float32(2)})  # pyright: ignore[reportArgumentType]
    assert params.logit_bias == ((5, -0.5), (7, 2.0), (12, 1.0))
    assert replace(params, n=2).logit_bias == params.logit_bias
    assert hash(params) == hash(SamplingParams(logit_bias={5: -0.5, 7: 2, 12: 1}))
    assert SamplingParams(logit_bias={}) == SamplingParams(logit_bias=None) == SamplingParams()


def test_one_token_can_not_have_two_biases():
    with pytest.raises(InvalidRequestError, match="logit_bias: a token id must be named once"):
        SamplingParams(logit_bias={5: 1, "5": 2})


def test_too_many_biases_are_refused_with_both_numbers():
    many = dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)
    with pytest.raises(InvalidRequestError, match=r"^logit_bias must be at most 300 ids, not 301$"):
        SamplingParams(logit_bias=many)


def test_min_tokens_can_be_all_of_max_tokens_and_no_more():
    assert SamplingParams(min_tokens=32, max_tokens=32).min_tokens == 32
    with pytest.raises(
        InvalidRequestError, match="min_tokens must be at most max_tokens, 31"
    ) as one:
        SamplingParams(min_tokens=32, max_tokens=31)
    assert one.value.param == "min_tokens"


def test_a_single_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_lists_are_kept_as_tuples_of_their_own() -> None:
    stops, ids = ["a"], [3]
    params = SamplingParams(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(4)
    assert (params.stop, params.stop_token_ids) == (("a",), (3,))


def test_null_lists_are_empty() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_top_k_of_minus_one_means_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (-0.0, True), (1e-30, False)])
def test_only_temperature_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_params_are_hashable_and_can_not_be_changed() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))
    with pytest.raises(FrozenInstanceError):
        params.top_k = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_options_have_no_positions() -> None:
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # pyright: ignore[reportCallIssue]


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), top_k=np.int32(2))  # pyright: ignore[reportArgumentType]
    assert (params.temperature, params.seed, params.top_k) == (0.5, 3, 2)
    assert {type(params.temperature), type(params.seed)} == {float, int}


def test_too_many_stop_ids_are_refused():
    with pytest.raises(InvalidRequestError, match="stop_token_ids must be at most 1024 ids"):
        SamplingParams(stop_token_ids=[1] * 1025)
