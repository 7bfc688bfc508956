"""What EngineProcess and its child process say to each other, in MessagePack. No jax here.

One message is one Command (to the child) or one Event (from it). The child sends one Step a step of
its engine, so that what a message costs is paid once for all rows.
"""

import struct
from array import array
from dataclasses import fields
from typing import Any

import msgspec

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.thread import MAX_ERROR_CHARACTERS, EngineError
from qwen35_jax.errors import USER_ERRORS, InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams

# Inside a private directory that the parent makes; each is bound by the side that receives.
COMMANDS_SOCKET = "commands"
EVENTS_SOCKET = "events"

# MessagePack holds no longer ones. Only numbers that mean "as much as you can" go over it.
LARGEST_INTEGER = 2**63 - 1

_PARAM_DEFAULTS = tuple((field.name, field.default) for field in fields(SamplingParams))
_ERROR_CLASSES = {error.__name__: error for error in (*USER_ERRORS, EngineError)}


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A tagged array: the class's name, then its fields in order."""


class Load(Message, frozen=True):
    """Call `factory` ("module:function") with `config`; log from `log_level` up."""

    factory: str
    config: EngineConfig
    log_level: int


class Submit(Message, frozen=True):
    """A Request. prompt: its ids as int64. params: the fields that are not at their defaults."""

    request_id: str
    prompt: bytes
    params: dict[str, Any]


class Abort(Message, frozen=True):
    request_id: str


class Close(Message, frozen=True):
    """Close the engine and end, whatever still runs."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception on its way to the other process. kind: the name of a class that it knows."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Hello(Message, frozen=True):
    """The child listens for commands."""


class Log(Message, frozen=True):
    """A log record of the child's, formatted."""

    logger: str
    level: int
    text: str


class Ready(Message, frozen=True):
    """The engine is loaded. description: one line about the model and what it runs on."""

    process_id: int
    model_name: str
    max_model_len: int
    description: str


class Accepted(Message, frozen=True):
    request_id: str


class Refused(Message, frozen=True):
    request_id: str
    failure: Failure


class Step(Message, frozen=True):
    """A step has ended; outputs: what it gave every request that it moved, often none."""

    outputs: list[TokenOutput]


class Failed(Message, frozen=True):
    """Loading or a step raised: the child only waits for Close now."""

    failure: Failure


Command = Load | Submit | Abort | Close
Event = Hello | Log | Ready | Accepted | Refused | Step | Failed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode


def encode_request(request: Request) -> bytes:
    """A Submit. Raises InvalidRequestError for values that no message can carry."""
    try:
        prompt = array("q", request.prompt_token_ids).tobytes()
    except (TypeError, OverflowError):
        raise InvalidRequestError(
            "prompt must be token ids; it holds what is no integer of 64 bits", param="prompt"
        ) from None
    params = {
        name: min(value, LARGEST_INTEGER) if isinstance(value, int) else value
        for name, default in _PARAM_DEFAULTS
        if (value := getattr(request.params, name)) != default
    }
    try:
        return encode(Submit(request.request_id, prompt, params))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"the request can't be sent to the engine: {error}") from None


def decode_request(submit: Submit) -> Request:
    """The Request again, its params checked once more, which takes tens of microseconds."""
    prompt = struct.unpack(f"{len(submit.prompt) // 8}q", submit.prompt)
    return Request(submit.request_id, prompt, SamplingParams(**submit.params))


def failure_of(error: BaseException, what_failed: str) -> Failure:
    """What a user can cause keeps its class; anything else becomes an EngineError of one line."""
    for error_class in USER_ERRORS:
        if isinstance(error, error_class):
            param, code = getattr(error, "param", None), getattr(error, "code", None)
            return Failure(error_class.__name__, str(error), param, code)
    return engine_failure(error, what_failed)


def engine_failure(error: BaseException, what_failed: str) -> Failure:
    """An EngineError of one short line: compiler and device errors can be pages long."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    text = f"{what_failed}: {type(error).__name__}"
    if first_line:
        text = f"{text}: {first_line}"
    if len(text) > MAX_ERROR_CHARACTERS:
        text = text[: MAX_ERROR_CHARACTERS - 1] + "…"
    return Failure(EngineError.__name__, text)


def exception_of(failure: Failure) -> Exception:
    """The exception that `failure_of` was given, or the EngineError that it made of it."""
    error_class = _ERROR_CLASSES[failure.kind]
    if error_class is InvalidRequestError:
        return InvalidRequestError(failure.message, param=failure.param, code=failure.code)
    return error_class(failure.message)
