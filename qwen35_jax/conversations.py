"""The conversations that LLM.chat is given: each becomes a prompt's text, or a refusal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen35_jax.chat_template import SPECIAL_TOKEN_NAMES, ChatTemplate
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.prompts import is_list
from qwen35_jax.tokenizer import read_json_object, token_text

Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
_MEDIA = ("image", "image_url", "video", "video_url", "audio", "input_audio", "file")

# What chat_template_kwargs may not name: arguments of their own.
_OWN_ARGUMENTS = ("self", "messages", "tools", "add_generation_prompt", "chat_template")
# Options of other libraries' chat methods that have no meaning here.
_NOT_FOR_TEMPLATES = ("tokenize", "continue_final_message", "return_tensors", "return_dict")


def as_conversations(messages: object) -> list[Any]:
    """One conversation or a list of them -> a list. A list with a message in it is one."""
    if not is_list(messages):
        raise InvalidRequestError(
            'messages must be a conversation, such as [{"role": "user", "content": "Hello"}], or '
            f"a list of them, not {type(messages).__name__}",
            param="messages",
        )
    if any(isinstance(item, Mapping) for item in messages):
        return [messages]
    return list(messages)


def render_conversations(
    template: ChatTemplate,
    conversations: Sequence[Any],
    *,
    tools: object,
    add_generation_prompt: bool,
    enable_thinking: object,
    template_kwargs: Mapping[str, Any] | None,
) -> list[str | InvalidRequestError]:
    """The prompt of each conversation, or why it has none.

    tools, enable_thinking: one for all, or a list with each conversation's own.

    Raises InvalidRequestError for options that are wrong for all of them.
    """
    kwargs = _checked_kwargs(template_kwargs)
    if not isinstance(add_generation_prompt, bool):
        raise InvalidRequestError(
            f"add_generation_prompt must be True or False, not {add_generation_prompt!r:.80}",
            param="add_generation_prompt",
        )
    if "enable_thinking" in kwargs:
        if enable_thinking is not None:
            raise InvalidRequestError(
                "enable_thinking is given twice: as itself and in chat_template_kwargs",
                param="enable_thinking",
            )
        enable_thinking = kwargs.pop("enable_thinking")
    count = len(conversations)
    each_tools = _one_each(
        "tools",
        tools,
        count,
        fits=_are_tools,
        wanted="a list of tool definitions (objects that name a function)",
    )
    each_thinking = _one_each(
        "enable_thinking",
        enable_thinking,
        count,
        fits=lambda value: value is None or isinstance(value, bool),
        wanted="True, False or None",
    )
    rendered: list[str | InvalidRequestError] = []
    for conversation, own_tools, thinking in zip(
        conversations, each_tools, each_thinking, strict=True
    ):
        try:
            if not is_list(conversation):
                raise InvalidRequestError(
                    f"a conversation is a list of messages, not {conversation!r:.80}",
                    param="messages",
                )
            check_messages(conversation)
            prompt = template.render(
                conversation,
                tools=own_tools,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=thinking,
                **kwargs,
            )
        except InvalidRequestError as error:
            rendered.append(error)
        else:
            rendered.append(prompt)
    return rendered


def check_messages(conversation: Sequence[Any]) -> None:
    """Raise InvalidRequestError, naming the message, for what no template is to be asked about."""
    for index, message in enumerate(conversation):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _refusal(f"{where} must be an object, not {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _refusal(
                f"{where} has no role"
                if role is None
                else f"{where} has the unknown role {role!r:.40}; roles are {', '.join(ROLES)}"
            )
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise _refusal(f"{where} (of the {role}) has no content")
        # Templates read it more than once: an iterator would be empty the second time.
        if content is not None and not isinstance(content, str) and not is_list(content):
            raise _refusal(
                f"{where} has content that is neither text nor a list of parts: "
                f"{type(content).__name__}"
            )
        for part in content if is_list(content) else ():
            _check_part(where, part)


def _check_part(where: str, part: Any) -> None:
    if not isinstance(part, Mapping):
        raise _refusal(f"{where} has a content part that is no object: {part!r:.80}")
    media = next((name for name in _MEDIA if part.get("type") == name or name in part), None)
    if media is not None:
        raise _refusal(f"{where} has a part of type {media}; only text parts are supported")


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def template_from_text(source: object, directory: Path) -> ChatTemplate:
    """A template that the caller brings, with the special tokens of the checkpoint's tokenizer.

    Raises InvalidRequestError where it isn't text, TokenizerError where it doesn't compile.
    """
    if not isinstance(source, str):
        raise InvalidRequestError(
            f"chat_template must be a template's text, not {type(source).__name__}",
            param="chat_template",
        )
    if "{" not in source:
        raise InvalidRequestError(
            f"chat_template is a template's text, and {source!r:.80} has no expression in it: read "
            "the file, where this is its path",
            param="chat_template",
        )
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    tokens = {name: token_text(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    special_tokens = {name: text for name, text in tokens.items() if text is not None}
    return ChatTemplate(source, name="chat_template", special_tokens=special_tokens)


def _checked_kwargs(template_kwargs: object) -> dict[str, Any]:
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping) or not all(
        isinstance(name, str) for name in template_kwargs
    ):
        raise InvalidRequestError(
            f"chat_template_kwargs must map names to values, not {template_kwargs!r:.80}",
            param="chat_template_kwargs",
        )
    for name in _OWN_ARGUMENTS:
        if name in template_kwargs:
            raise InvalidRequestError(
                f"chat_template_kwargs can't set {name}; it is an argument of its own",
                param="chat_template_kwargs",
            )
    for name in _NOT_FOR_TEMPLATES:
        if name in template_kwargs:
            raise InvalidRequestError(
                f"chat_template_kwargs can't set {name}: it is no variable of a template",
                param="chat_template_kwargs",
            )
    return dict(template_kwargs)


def _are_tools(value: object) -> bool:
    return value is None or (is_list(value) and all(_is_tool(definition) for definition in value))


def _is_tool(definition: object) -> bool:
    if not isinstance(definition, Mapping):
        return False
    function = definition.get("function", definition)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _one_each(
    name: str, value: Any, count: int, *, fits: Callable[[Any], bool], wanted: str
) -> list[Any]:
    """`value` for each of so many conversations, or, where it is a list of such, its entries."""
    if fits(value):
        return [value] * count
    if not is_list(value) or not all(map(fits, value)):
        raise InvalidRequestError(
            f"{name} must be {wanted}, or a list with one for each conversation, not {value!r:.80}",
            param=name,
        )
    if len(value) != count:
        raise InvalidRequestError(
            f"{name} has {len(value)} entries for {count} conversations", param=name
        )
    return list(value)
