"""What crosses between the engine's process and its parent arrives as it was sent."""

from typing import Any

import numpy as np
import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.messages import (
    LARGEST_INTEGER,
    Abort,
    Close,
    Load,
    Step,
    Submit,
    decode_command,
    decode_event,
    decode_request,
    encode,
    encode_request,
    exception_of,
    failure_of,
)
from qwen35_jax.engine.request import Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.thread import MAX_ERROR_CHARACTERS, EngineError
from qwen35_jax.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    TokenizerError,
)
from qwen35_jax.sampling_params import SamplingParams

# Every field is away from its default.
ALL_PARAMS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "seed": -(2**63),
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: -100.0, 3: 1.25},
    "max_tokens": None,
    "min_tokens": 3,
    "stop": ["ďábelské", "🔥"],
    "stop_token_ids": [7, 8],
    "ignore_eos": True,
    "logprobs": 0,
    "prompt_logprobs": 20,
    "skip_special_tokens": False,
}


def carried(request: Request) -> Request:
    command = decode_command(encode_request(request))
    assert isinstance(command, Submit)
    return decode_request(command)


def test_every_sampling_option_arrives():
    params = SamplingParams(**ALL_PARAMS)
    assert ALL_PARAMS.keys() == vars(params).keys()
    assert all(value != vars(SamplingParams())[name] for name, value in vars(params).items())
    request = Request("cmpl-1", (0, 248_319, 5), params)
    assert carried(request) == request


def test_options_at_their_defaults_are_not_sent():
    command = decode_command(encode_request(Request("a", (1,), SamplingParams(top_k=3))))
    assert isinstance(command, Submit)
    assert command.params == {"top_k": 3}


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_prompts_of_every_length_arrive(length: int):
    request = Request("a", tuple(range(length)), SamplingParams())
    assert carried(request) == request


def test_numpy_ids_arrive_as_integers():
    prompt: Any = tuple(np.array([3, 4], np.int32))
    assert carried(Request("a", prompt, SamplingParams())).prompt_token_ids == (3, 4)


def test_numbers_that_mean_no_limit_fit():
    params = SamplingParams(max_tokens=10**30, temperature=10**30)
    arrived = carried(Request("a", (1,), params)).params
    assert arrived.max_tokens == arrived.temperature == LARGEST_INTEGER


@pytest.mark.parametrize("prompt", [(1, 2**63), (1, 2.5), (1, "a"), (None,)])
def test_a_prompt_of_anything_else_is_refused(prompt: Any):
    with pytest.raises(InvalidRequestError, match="prompt must be token ids") as caught:
        encode_request(Request("a", prompt, SamplingParams()))
    assert caught.value.param == "prompt"


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(InvalidRequestError, match="can't be sent"):
        encode_request(Request("a", (1,), SamplingParams(stop="\ud800")))


def test_outputs_arrive_exactly():
    logprobs = TokenLogprobs(-0.1, ((5, -0.1), (6, -1 / 3), (7, float("-inf"))))
    outputs = [
        TokenOutput("a"),
        TokenOutput("b", (1, 2), (logprobs, TokenLogprobs(-1e-300, ())), "stop", 2),
        TokenOutput("c", finish_reason="error", error="ошибка"),
        TokenOutput("d", (9,), prompt_logprobs=(None, logprobs)),
    ]
    assert decode_event(encode(Step(outputs))) == Step(outputs)


def test_commands_arrive():
    config = EngineConfig(model="a/b", max_model_len=77, dtype="float32", kv_cache_tokens=1)
    for command in (Load("module:function", config, 20), Abort("a"), Close()):
        assert decode_command(encode(command)) == command


@pytest.mark.parametrize("error_class", [ConfigError, CheckpointError, TokenizerError])
def test_user_errors_keep_their_class(error_class: type[Exception]):
    error = exception_of(failure_of(error_class("name the thing"), "unused"))
    assert type(error) is error_class
    assert str(error) == "name the thing"


def test_a_refusal_keeps_param_and_code():
    error = exception_of(failure_of(InvalidRequestError("no", param="p", code="c"), "unused"))
    assert isinstance(error, InvalidRequestError)
    assert (str(error), error.param, error.code) == ("no", "p", "c")


def test_other_errors_become_one_short_line():
    error = exception_of(failure_of(RuntimeError("x" * 10_000 + "\nmore"), "loading failed"))
    assert isinstance(error, EngineError)
    assert str(error).startswith("loading failed: RuntimeError: xxx")
    assert len(str(error)) == MAX_ERROR_CHARACTERS
    assert str(exception_of(failure_of(KeyError(), "loading failed"))) == "loading failed: KeyError"
