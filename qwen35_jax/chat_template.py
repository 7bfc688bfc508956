"""A conversation to the prompt's text: the checkpoint's own Jinja template, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen35_jax.default_model import default_model_files
from qwen35_jax.errors import InvalidRequestError, TokenizerError
from qwen35_jax.tokenizer import one_line, read_json_object, token_text

# What templates may name besides the conversation.
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """A compiled chat template.

    source: the Jinja text. name: what error messages call it. special_tokens: their spelling by
    name (`eos_token`), which the template may use. Raises TokenizerError where it doesn't compile.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "chat template",
        special_tokens: Mapping[str, str] | None = None,
    ):
        try:
            self._template = _environment().from_string(source, globals=_globals())
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"{name} line {error.lineno} is not a valid template: {one_line(error)}"
            ) from None
        # Jinja hands Python the code it makes, with any name, number and nesting, to compile. The
        # lines of a SyntaxError are that code's, so only its message says something.
        except Exception as error:
            reason = error.msg if isinstance(error, SyntaxError) else one_line(error)
            raise TokenizerError(f"{name} is not a valid template: {reason}") from None
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, path: str | Path) -> "ChatTemplate | None":
        """The template of a checkpoint directory, or None where it has none.

        Looks in chat_template.jinja, tokenizer_config.json, chat_template.json, in this order.
        Raises TokenizerError naming the file.
        """
        directory = Path(path)
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        tokens = {name: token_text(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
        special_tokens = {name: text for name, text in tokens.items() if text is not None}

        jinja_path = directory / "chat_template.jinja"
        if jinja_path.is_file():
            try:
                source = jinja_path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{jinja_path} can't be read: {one_line(error)}") from None
            return cls(source, name=str(jinja_path), special_tokens=special_tokens)

        json_path = directory / "chat_template.json"
        source, found_in = config.get("chat_template"), config_path
        if source is None and json_path.is_file():
            source, found_in = read_json_object(json_path).get("chat_template"), json_path
        if source is None:
            return None
        if not isinstance(source, str):
            raise TokenizerError(
                f"{found_in}: chat_template must be a string, not {type(source).__name__}; "
                "put the template to use in chat_template.jinja"
            )
        return cls(source, name=f"{found_in} chat_template", special_tokens=special_tokens)

    @classmethod
    def built_in(cls) -> "ChatTemplate":
        """The embedded default model's template: the rules of the published Qwen3.5 4B one."""
        asset = default_model_files() / "chat_template.jinja"
        return cls(asset.read_text(encoding="utf-8"), name="the built-in chat template")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation.

        messages: OpenAI chat messages; `developer` counts as `system`, and a tool call's arguments
            may be a JSON string. They are not changed.
        tools: OpenAI tool definitions.
        add_generation_prompt: end with the start of the assistant's turn.
        enable_thinking: None leaves it to the template.
        template_kwargs: more names for the template.

        Raises InvalidRequestError with the template's own message where it refuses.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            **template_kwargs,
            "messages": [_normalised(message, place) for place, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            return self._template.render(variables)
        # A template is a program that runs over the user's data: it can fail in any way.
        except Exception as error:
            _refuse(f"the chat template can't render these messages: {one_line(error)}")


def _normalised(message: object, place: int) -> Mapping[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping):
        _refuse(f"{where} must be an object, not {type(message).__name__}")
    changes: dict[str, Any] = {}
    if message.get("role") == "developer":
        changes["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            _refuse(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
        changes["tool_calls"] = [
            _with_parsed_arguments(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(calls)
        ]
    return {**message, **changes} if changes else message


def _with_parsed_arguments(call: object, where: str) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(f"{where} must be an object, not {type(call).__name__}")
    if "function" in call:
        function = call["function"]
        if not isinstance(function, Mapping):
            _refuse(f"{where}.function must be an object, not {type(function).__name__}")
        return {**call, "function": _parsed_call(function, f"{where}.function")}
    return _parsed_call(call, where)


def _parsed_call(call: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if "arguments" not in call:
        return call
    return {**call, "arguments": _parsed_arguments(call["arguments"], f"{where}.arguments")}


def _parsed_arguments(arguments: object, where: str) -> Mapping[str, Any]:
    # Clients send null or "" for a call without arguments.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            _refuse(f"{where} is not valid JSON: {one_line(error)}")
    if not isinstance(arguments, Mapping):
        _refuse(f"{where} must be a JSON object, not {type(arguments).__name__}")
    return arguments


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="messages") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _globals() -> dict[str, Any]:
    return {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
