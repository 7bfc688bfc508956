"""The built-in template rule by rule, and what rendering does around any template."""

import copy
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.errors import InvalidRequestError, TokenizerError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}
USER_TURN = "<|im_start|>user\nhi<|im_end|>\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Find <é> & 'co'", "parameters": {}},
}
TOOL_LINE = (
    '{"type": "function", "function": {"name": "look", '
    '"description": "Find <é> & \'co\'", "parameters": {}}}'
)

built_in = ChatTemplate.built_in()


def turns(*messages: dict[str, Any], **options: Any) -> str:
    return built_in.render(messages, add_generation_prompt=False, **options)


def assistant(content: object = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


# Turns


def test_turn_is_role_and_trimmed_text():
    assert turns({"role": "user", "content": " \n hi\tthere \n\n"}) == (
        "<|im_start|>user\nhi\tthere<|im_end|>\n"
    )


def test_earlier_and_later_turns_follow_each_other():
    assert turns(SYSTEM, USER, assistant(" yes "), USER) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        + USER_TURN
        + "<|im_start|>assistant\nyes<|im_end|>\n"
        + USER_TURN
    )


def test_content_parts_are_joined_then_trimmed():
    parts = [
        {"type": "text", "text": "  a "},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": " b"},
        {"type": "video", "video": "file"},
        {"type": "image"},
        {"type": "text", "text": "c  "},
    ]
    assert turns({"role": "user", "content": parts}) == (
        f"<|im_start|>user\na {IMAGE} b{VIDEO}{IMAGE}c<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "content",
    [3, {"type": "text", "text": "a"}, ["a"], [{"type": "audio"}], [{"type": "text", "text": 3}]],
)
def test_content_of_another_form_is_refused(content: object):
    with pytest.raises(InvalidRequestError, match="content"):
        turns({"role": "user", "content": content})


def test_unknown_role_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="Unknown message role: critic"):
        turns(USER, {"role": "critic", "content": "no"})


# System and tools


def test_no_system_turn_without_system_message_or_tools():
    assert turns(USER) == turns(USER, tools=[]) == turns(USER, tools=None) == USER_TURN


def test_empty_system_message_still_gives_a_turn():
    assert turns({"role": "system", "content": " "}, USER) == (
        "<|im_start|>system\n<|im_end|>\n" + USER_TURN
    )


@pytest.mark.parametrize("messages", [(SYSTEM, SYSTEM, USER), (USER, SYSTEM), (USER, SYSTEM, USER)])
def test_system_message_after_the_first_is_refused(messages: tuple[dict[str, Any], ...]):
    with pytest.raises(InvalidRequestError, match="A system message must come first"):
        turns(*messages)


@pytest.mark.parametrize(("kind", "name"), [("image", "an image"), ("video", "a video")])
def test_system_message_with_media_is_refused(kind: str, name: str):
    with pytest.raises(InvalidRequestError, match=f"A system message can't hold {name}"):
        turns({"role": "system", "content": [{"type": kind}]}, USER)


def test_developer_counts_as_system():
    assert turns({"role": "developer", "content": "Be brief."}, USER) == turns(SYSTEM, USER)


def test_tools_give_a_system_turn_with_one_json_line_each():
    text = turns(USER, tools=[TOOL, {"name": "other"}])
    assert text.startswith("<|im_start|>system\n# Tools\n\n")
    assert f'\n\n<tools>\n{TOOL_LINE}\n{{"name": "other"}}\n</tools>\n\n' in text
    assert text.endswith("\n</IMPORTANT><|im_end|>\n" + USER_TURN)


def test_tool_instructions_show_the_call_form_and_an_important_block():
    text = turns(USER, tools=[TOOL])
    form = (
        r"\n\n<tool_call>\n<function=\w+>\n(<parameter=\w+>\n[^<]+\n</parameter>\n){2}"
        r"</function>\n</tool_call>\n\n<IMPORTANT>\n[^\0]+\n</IMPORTANT><\|im_end\|>"
    )
    assert re.search(form, text)


def test_system_text_comes_after_the_tool_text():
    text = turns(SYSTEM, USER, tools=[TOOL])
    assert text.count("<|im_start|>system") == 1
    assert text.endswith("\n</IMPORTANT>\n\nBe brief.<|im_end|>\n" + USER_TURN)


def test_empty_system_text_adds_nothing_to_the_tool_text():
    assert turns({"role": "system", "content": " "}, USER, tools=[TOOL]) == turns(
        USER, tools=[TOOL]
    )


# Last query and reasoning


@pytest.mark.parametrize(
    "messages",
    [
        (SYSTEM,),
        (SYSTEM, assistant("hello")),
        ({"role": "user", "content": " <tool_response>\n4\n</tool_response> "},),
    ],
)
def test_conversation_without_a_query_is_refused(messages: tuple[dict[str, Any], ...]):
    with pytest.raises(InvalidRequestError, match="A conversation needs a user message"):
        turns(*messages)


def test_no_messages_are_refused():
    with pytest.raises(InvalidRequestError, match="at least one message") as caught:
        turns()
    assert caught.value.param == "messages"


def test_answer_after_the_last_query_has_a_think_block_even_when_empty():
    assert turns(USER, assistant(" yes ")) == (
        USER_TURN + "<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|im_end|>\n"
    )


def test_reasoning_content_is_trimmed_into_the_think_block():
    assert turns(USER, assistant("yes", reasoning_content="\n why \n")) == (
        USER_TURN + "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nyes<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "content",
    ["<think>\nwhy\n</think>\n\nyes", "why</think>yes", "x<think>y<think> why </think>\nyes"],
)
def test_reasoning_inside_the_content_is_taken_out(content: str):
    expected = "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nyes<|im_end|>\n"
    assert turns(USER, assistant(content)) == USER_TURN + expected


def test_reasoning_content_leaves_the_content_alone():
    assert turns(USER, assistant("a</think>b", reasoning_content="")) == (
        USER_TURN + "<|im_start|>assistant\n<think>\n\n</think>\n\na</think>b<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "answer", [assistant("<think>why</think>\n\nyes"), assistant("yes", reasoning_content="why")]
)
def test_reasoning_before_the_last_query_is_dropped(answer: dict[str, Any]):
    assert turns(USER, answer, USER) == (
        USER_TURN + "<|im_start|>assistant\nyes<|im_end|>\n" + USER_TURN
    )


def test_user_text_that_is_a_tool_response_is_no_query():
    response = {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}
    text = turns(USER, assistant("a", reasoning_content="why"), response, assistant("b"))
    assert "<think>\nwhy\n</think>\n\na<|im_end|>" in text
    assert "<think>\n\n</think>\n\nb<|im_end|>" in text


# Tool calls and results


def test_tool_call_values_are_json_for_containers_and_python_text_otherwise():
    arguments = {
        "city": "Plzeň <1>\n",
        "count": 3,
        "share": 0.5,
        "fresh": True,
        "limit": None,
        "filter": {"é": [1, True]},
        "ids": [],
    }
    expected = (
        "<tool_call>\n<function=look>\n"
        "<parameter=city>\nPlzeň <1>\n\n</parameter>\n"
        "<parameter=count>\n3\n</parameter>\n"
        "<parameter=share>\n0.5\n</parameter>\n"
        "<parameter=fresh>\nTrue\n</parameter>\n"
        "<parameter=limit>\nNone\n</parameter>\n"
        '<parameter=filter>\n{"é": [1, true]}\n</parameter>\n'
        "<parameter=ids>\n[]\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    text = turns(USER, assistant(None, tool_calls=[call("look", arguments)]))
    assert text == (
        f"{USER_TURN}<|im_start|>assistant\n<think>\n\n</think>\n\n{expected}<|im_end|>\n"
    )
    as_json = [call("look", json.dumps(arguments))]
    assert turns(USER, assistant(None, tool_calls=as_json)) == text


def test_calls_stand_after_the_content_and_one_newline_apart():
    calls = [call("one", {}), {"name": "two", "arguments": {}}]
    one = "<tool_call>\n<function=one>\n</function>\n</tool_call>"
    two = "<tool_call>\n<function=two>\n</function>\n</tool_call>"
    assert turns(USER, assistant("Let me see.", tool_calls=calls), USER) == (
        f"{USER_TURN}<|im_start|>assistant\nLet me see.\n\n{one}\n{two}<|im_end|>\n{USER_TURN}"
    )


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_call_without_arguments_has_no_parameters(arguments: object):
    text = turns(USER, assistant("", tool_calls=[call("look", arguments)]), USER)
    assert "<tool_call>\n<function=look>\n</function>\n</tool_call><|im_end|>" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        ('"text"', "must be a JSON object, not str"),
        (3, "must be a JSON object, not int"),
    ],
)
def test_arguments_that_are_no_json_object_are_refused(arguments: object, message: str):
    with pytest.raises(
        InvalidRequestError,
        match=rf"messages\[1\]\.tool_calls\[0\]\.function\.arguments {message}",
    ) as caught:
        turns(USER, assistant("", tool_calls=[call("look", arguments)]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("calls", [{"name": "a"}, "look", ["look"], [{"function": "look"}]])
def test_malformed_tool_calls_are_refused_with_their_place(calls: object):
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.tool_calls.* must be"):
        turns(USER, assistant("", tool_calls=calls))


def test_call_without_a_name_is_refused():
    with pytest.raises(InvalidRequestError, match="needs the name of its function"):
        turns(USER, assistant("", tool_calls=[{"function": {"arguments": "{}"}}]))


def test_consecutive_tool_results_share_one_user_turn():
    asking = assistant("", tool_calls=[call("one", {}), call("two", {})])
    text = turns(USER, asking, tool(" 1 "), tool("2"), asking, tool("3"), USER)
    assert text.count("<tool_response>") == 3
    assert (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ) in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n" + USER_TURN
    )


def test_tool_results_at_the_end_close_their_turn_and_keep_reasoning():
    asking = assistant("", reasoning_content="why", tool_calls=[call("one", {})])
    text = turns(USER, asking, tool("1"))
    assert "<think>\nwhy\n</think>\n\n<tool_call>" in text
    assert text.endswith("<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n")


def test_tool_result_that_opens_the_conversation_has_no_user_header():
    assert turns(tool("1"), USER) == (
        "\n<tool_response>\n1\n</tool_response><|im_end|>\n" + USER_TURN
    )


# Generation prompt


@pytest.mark.parametrize("enable_thinking", [None, True])
def test_generation_prompt_opens_a_think_block(enable_thinking: bool | None):
    assert built_in.render([USER], enable_thinking=enable_thinking) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_thinking_off_closes_the_think_block():
    assert built_in.render([USER], enable_thinking=False) == (
        USER_TURN + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_only_exactly_false_turns_thinking_off():
    source = built_in.render([USER], **{"enable_thinking": 0})  # type: ignore[arg-type]
    assert source.endswith("<|im_start|>assistant\n<think>\n")


# Rendering around any template


def test_messages_are_not_changed():
    messages = [
        {"role": "developer", "content": "x"},
        USER,
        assistant("", tool_calls=[call("look", '{"a": 1}')]),
        tool("1"),
    ]
    before = copy.deepcopy(messages)
    built_in.render(messages, tools=[TOOL])
    assert messages == before


def test_template_cannot_change_messages():
    template = ChatTemplate("{{ messages.append(1) }}")
    with pytest.raises(InvalidRequestError, match="append"):
        template.render([USER])


def test_sandbox_keeps_the_template_from_python_internals():
    template = ChatTemplate("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].a.b }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ nothing | tojson }}"],
)
def test_any_failure_inside_a_template_is_an_invalid_request(source: str):
    with pytest.raises(InvalidRequestError, match="the chat template can't render") as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_raise_exception_message_is_quoted():
    template = ChatTemplate("{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render([USER])


def test_message_that_is_no_object_is_refused():
    with pytest.raises(InvalidRequestError, match=r"messages\[1\] must be an object, not str"):
        built_in.render([USER, "hi"])  # type: ignore[list-item]


def test_enable_thinking_is_undefined_unless_given():
    template = ChatTemplate("{{ enable_thinking is defined }} {{ enable_thinking }}")
    assert template.render([USER]) == "False "
    assert template.render([USER], enable_thinking=False) == "True False"


def test_more_names_reach_the_template():
    template = ChatTemplate("{{ style }} {{ add_generation_prompt }} {{ tools }}")
    assert template.render([USER], style="plain") == "plain True None"


def test_tojson_does_not_escape_and_takes_the_options_of_json():
    template = ChatTemplate("{{ value | tojson }} {{ value | tojson(indent=1, sort_keys=true) }}")
    value = {"b": "<é&'>", "a": 1}
    expected = json.dumps(value, ensure_ascii=False) + " "
    expected += json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True)
    assert template.render([USER], value=value) == expected


def test_blocks_are_trimmed_and_loops_can_break():
    template = ChatTemplate(
        "{% for message in messages %}\n"
        "  {% if loop.index0 == 1 %}\n    {% break %}\n  {% endif %}\n"
        "{{ message.content }}\n{% endfor %}\nend"
    )
    assert template.render([USER, USER]) == "hi\nend"


def test_strftime_now_formats_the_current_time():
    year = int(ChatTemplate("{{ strftime_now('%Y') }}").render([USER]))
    assert abs(year - datetime.now().year) <= 1


# Files


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_template_is_looked_for_in_three_files_in_order(tmp_path: Path):
    assert ChatTemplate.from_directory(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<e>"})
    assert ChatTemplate.from_directory(tmp_path) is None
    found = []
    for name, value in (
        ("chat_template.json", {"chat_template": "from json"}),
        ("tokenizer_config.json", {"chat_template": "from config"}),
    ):
        write_json(tmp_path / name, value)
        found.append(ChatTemplate.from_directory(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("from jinja ě", encoding="utf-8")
    found.append(ChatTemplate.from_directory(tmp_path))
    texts = [template.render([USER]) for template in found if template is not None]
    assert texts == ["from json", "from config", "from jinja ě"]


def test_special_tokens_of_the_config_are_known_to_the_template(tmp_path: Path):
    config = {"eos_token": "<e>", "bos_token": {"content": "<b>"}, "pad_token": None}
    write_json(tmp_path / "tokenizer_config.json", config)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render([USER]) == "<b><e>"


@pytest.mark.parametrize("source", ["{% if %}", "{{ a | no_such_filter }}", "{% generation %}"])
def test_template_that_does_not_compile_names_its_file_and_line(tmp_path: Path, source: str):
    path = tmp_path / "chat_template.jinja"
    path.write_text("\n" + source)
    with pytest.raises(TokenizerError, match=re.escape(f"{path} line 2 is not a valid template")):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "9" * 5000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 150 + "{% endif %}" * 150,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ f(a=1, a=2) }}",
        "{% break %}",
    ],
    ids=["digits", "loops", "conditions", "parentheses", "repeated argument", "break"],
)
def test_template_that_python_does_not_compile_is_one_line(source: str):
    with pytest.raises(TokenizerError, match=r"^the name is not a valid template: ") as caught:
        ChatTemplate(source, name="the name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_template_that_is_no_string_is_refused(tmp_path: Path, name: str):
    write_json(tmp_path / name, {"chat_template": [{"name": "default", "template": "x"}]})
    with pytest.raises(TokenizerError, match=f"{name}: chat_template must be a string, not list"):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_unreadable_file_is_one_line_that_names_it(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"\xff\xfe\n")
    with pytest.raises(TokenizerError, match=re.escape(str(tmp_path / name))) as caught:
        ChatTemplate.from_directory(tmp_path)
    assert "\n" not in str(caught.value)
