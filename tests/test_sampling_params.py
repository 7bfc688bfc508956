"""SamplingParams takes what it documents and refuses everything else by name."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams


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
