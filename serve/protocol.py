"""The JSON of requests and responses, and how a request's fields are checked by name."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from qwen35_jax.engine.request import FinishReason
from qwen35_jax.errors import InvalidRequestError

# Fields that clients of OpenAI and vLLM send and that have no effect here: each passes with the
# values that ask for nothing (and null), and is refused by name with any other.
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

JSON_TYPE_NAMES = {
    "int": "integer",
    "str": "string",
    "float": "number",
    "bool": "boolean",
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: one last chunk with totals. continuous_usage_stats: counts in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/completions; sampling fields mean what SamplingParams says."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None


class CompletionLogprobs(msgspec.Struct):
    """One entry a generated token. text_offset counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole response, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "qwen35-jax"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


def parse_request[RequestT: msgspec.Struct](body: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """The body as a `kind`. A null field is an absent field.

    Raises InvalidRequestError naming the field that is unknown, unsupported, missing or of a
    wrong type.
    """
    # Nulls inside stream_options and its like count too; deeper there are no named fields.
    present = {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in _without_nulls(body).items()
    }
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name in body:
        if name not in fields and name not in UNSUPPORTED_FIELDS:
            raise _unknown_field(name, (*fields, *UNSUPPORTED_FIELDS))
    for name, value in present.items():
        neutral_values = UNSUPPORTED_FIELDS.get(name, ())
        if name not in fields and not any(_same(value, neutral) for neutral in neutral_values):
            raise InvalidRequestError(
                f"{name} is not supported; leave it out"
                + (f" or send {_show(neutral_values[0])}" if neutral_values else ""),
                param=name,
                code="unsupported_field",
            )
    for name, field in fields.items():
        if field.required and name not in present:
            raise InvalidRequestError(f"{name} is required", param=name, code="missing_field")
    try:
        return msgspec.convert({name: present[name] for name in fields if name in present}, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _unknown_field(name: str, known: tuple[str, ...]) -> InvalidRequestError:
    message = f"unknown field {name!r}"
    # Matching is quadratic in the length of the name, which the client chooses.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75) if len(name) < 64 else []
    if near:
        message += f"; did you mean {near[0]!r}?"
    return InvalidRequestError(message, param=name[:64], code="unknown_field")


def _same(value: object, neutral: object) -> bool:
    # In Python True is 1; in JSON it is not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _show(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _wrong_type(message: str) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.stop[0]`" in JSON's words, path first."""
    found = re.fullmatch(r"(.*?) - at `\$\.?(.*)`", message)
    problem, path = found.groups() if found else (message, "")
    words = re.sub(
        r"\w+",
        lambda word: JSON_TYPE_NAMES.get(word[0], word[0]),
        problem.replace("`", "").replace(" | null", ""),
    )
    name = re.split(r"[.\[]", path)[0]
    return InvalidRequestError(
        f"{path}: {words[:1].lower()}{words[1:]}", param=name or None, code="invalid_type"
    )
