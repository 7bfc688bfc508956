"""LLM.chat: what each conversation's prompt is, who is refused, and that generate does the rest."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.memory_plan import MemoryPlan
from qwen35_jax.errors import ConfigError, InvalidRequestError, TokenizerError
from qwen35_jax.llm import LLM
from qwen35_jax.loading import LoadedEngine
from qwen35_jax.outputs import RequestOutput
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer
from tests.support.engines import default_llm, fast_compilation, two_layer_params
from tests.support.tiny_tokenizer import VOCABULARY_SIZE, write_tiny_tokenizer

TEMPLATE = ChatTemplate.built_in()
HELLO = [{"role": "user", "content": "hello"}]
WORLD = [{"role": "system", "content": "the world"}, {"role": "user", "content": "who is it?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CYCLE: dict[str, Any] = {}
CYCLE["function"] = CYCLE
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An LLM of the tiny tokenizer and its files, whose engine says hashes of the prompt."""

    def load(config: EngineConfig) -> LoadedEngine:
        return LoadedEngine(
            engine=cast(Any, FakeEngine(vocabulary_size=VOCABULARY_SIZE, max_model_len=2000)),
            params=two_layer_params(),
            tokenizer=Tokenizer.from_directory(directory),
            directory=directory,
            max_model_len=2000,
            model_name="tiny",
            description="tiny",
            memory_plan=cast(MemoryPlan, None),
        )

    monkeypatch.setattr("qwen35_jax.llm.load_engine", load)
    with LLM() as opened:
        yield opened


def chat(llm: LLM, messages: Any, params: Any = SHORT, **options: Any) -> list[RequestOutput]:
    return llm.chat(messages, params, use_tqdm=False, **options)


def prompts(llm: LLM, messages: Any, **options: Any) -> list[str | None]:
    results = chat(llm, messages, **options)
    assert [result.error for result in results] == [None] * len(results)
    return [result.prompt for result in results]


def errors(llm: LLM, messages: Any, **options: Any) -> list[str | None]:
    return [result.error for result in chat(llm, messages, **options)]


def test_a_chat_is_the_rendered_prompts_generation_by_the_real_model():
    with fast_compilation():
        llm = default_llm()
        results = chat(llm, [HELLO, WORLD])
        texts = [llm.chat_template.render(messages) for messages in (HELLO, WORLD)]
        expected = llm.generate(texts, SHORT, use_tqdm=False)
    assert [result.prompt for result in results] == texts
    for result, want in zip(results, expected, strict=True):
        assert result.prompt_token_ids == llm.tokenizer.encode(result.prompt or "")
        assert result.outputs == want.outputs
        assert len(result.outputs[0].token_ids) == 4


def test_one_conversation_gives_one_result(llm: LLM):
    (result,) = chat(llm, HELLO)
    assert result.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert result.outputs[0].text == chat(llm, [HELLO])[0].outputs[0].text
    (result,) = chat(llm, tuple(HELLO))
    assert result.prompt == prompts(llm, HELLO)[0]


def test_no_conversations_give_no_results(llm: LLM):
    assert chat(llm, []) == []


def test_a_list_of_conversations_gives_results_in_order(llm: LLM):
    asked = [HELLO, WORLD, HELLO * 3, WORLD]
    assert prompts(llm, asked) == [TEMPLATE.render(messages) for messages in asked]


def test_the_default_sampling_ends_after_sixteen_tokens(llm: LLM):
    (result,) = llm.chat(HELLO, use_tqdm=False)
    (output,) = result.outputs
    assert (len(output.token_ids), output.finish_reason) == (16, "length")


def test_each_conversation_may_have_its_own_sampling(llm: LLM):
    params = [SamplingParams(max_tokens=count) for count in (1, 3, 2)]
    results = chat(llm, [HELLO, [], WORLD], params)
    assert [len(one.outputs[0].token_ids) if one.outputs else None for one in results] == [
        *(1, None, 2)
    ]
    with pytest.raises(InvalidRequestError, match="sampling_params has 3 entries for 1 prompts"):
        chat(llm, HELLO, params)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            [{"role": "robot", "content": "x"}, *HELLO],
            r"messages\[0\] has the unknown role 'robot'",
        ),
        ([{"role": "robot", "content": "x"}], r"messages\[0\] has the unknown role 'robot'"),
        ([{"role": "user", "content": iter("x")}], "neither text nor a list of parts"),
        ([*HELLO, {"role": "assistant", "tool_calls": [CYCLE]}], "arguments|name of its function"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([*WORLD, {"role": "assistant"}], r"messages\[2\] \(of the assistant\) has no content"),
        ([{"role": "user", "content": [IMAGE]}], r"messages\[0\] has a part of type image_url"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\] has a content part that is no obj"),
        ([], "A conversation needs at least one message"),
        ([*HELLO, *WORLD], "A system message must come first"),
        ([*HELLO, "and?"], r"messages\[1\] must be an object, not str"),
        ([7], r"messages\[0\] must be an object, not int"),
        ("hello", "a conversation is a list of messages, not 'hello'"),
        ([{"role": "user", "content": "x" * 3000}], "prompt has 30.. tokens; .* holds 2000"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_a_bad_conversation_fails_alone(llm: LLM, bad: Any, reason: str):
    first, refused, last = chat(llm, [HELLO, bad, WORLD])
    assert refused.outputs == []
    assert refused.error is not None and "\n" not in refused.error
    assert re.search(reason, refused.error)
    assert [first.prompt, last.prompt] == [TEMPLATE.render(HELLO), TEMPLATE.render(WORLD)]
    assert (len(first.outputs), len(last.outputs)) == (1, 1)
    assert len({result.request_id for result in (first, refused, last)}) == 3


def test_only_bad_conversations_give_only_errors(llm: LLM):
    (error,) = errors(llm, [{"role": "robot", "content": "x"}, *HELLO])
    assert error is not None
    assert len(errors(llm, [["x"], ["y"]])) == 2


@pytest.mark.parametrize("messages", ["hello", HELLO[0], None, 3, b"hello"])
def test_what_is_no_list_at_all_is_refused(llm: LLM, messages: Any):
    with pytest.raises(InvalidRequestError, match=r'messages must be a conversation, such as \[{"'):
        chat(llm, messages)


def test_tools_are_for_all_or_one_list_a_conversation(llm: LLM):
    asked = [HELLO, WORLD]
    for tools in ([WEATHER], [WEATHER, TIME], []):
        assert prompts(llm, asked, tools=tools) == [
            TEMPLATE.render(messages, tools=tools) for messages in asked
        ]
    each = [[WEATHER, TIME], None]
    assert prompts(llm, asked, tools=each) == [
        TEMPLATE.render(HELLO, tools=each[0]),
        TEMPLATE.render(WORLD),
    ]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([print], "tools must be a list of tool definitions .*not .*print"),
        ("weather", "tools must be a list of tool definitions"),
        (WEATHER, "tools must be a list of tool definitions"),
        ([{}], "tools must be a list of tool definitions"),
        ([{"type": "function", "function": {}}], "tools must be a list of tool definitions"),
        ([[WEATHER], [print]], "tools must be a list of tool definitions"),
        ([[WEATHER]], "tools has 1 entries for 2 conversations"),
    ],
)
def test_wrong_tools_are_refused(llm: LLM, tools: Any, message: str):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat(llm, [HELLO, WORLD], tools=tools)
    assert caught.value.param == "tools"


def test_thinking_is_the_templates_own_unless_given_for_all_or_each(llm: LLM):
    default, on, off = (
        TEMPLATE.render(HELLO, enable_thinking=value) for value in (None, True, False)
    )
    assert default == on != off
    assert prompts(llm, [HELLO] * 2) == [default] * 2
    assert prompts(llm, [HELLO] * 2, enable_thinking=False) == [off] * 2
    assert prompts(llm, [HELLO] * 3, enable_thinking=[False, None, True]) == [off, default, on]


@pytest.mark.parametrize("value", ["no", 0, [True], [False, "no"]])
def test_wrong_thinking_is_refused(llm: LLM, value: Any):
    with pytest.raises(InvalidRequestError, match="enable_thinking"):
        chat(llm, [HELLO, WORLD], enable_thinking=value)


def test_a_prompt_without_the_assistants_turn(llm: LLM):
    assert prompts(llm, HELLO, add_generation_prompt=False) == [
        "<|im_start|>user\nhello<|im_end|>\n"
    ]


def test_another_template_has_the_checkpoints_special_tokens_and_the_given_names(llm: LLM):
    template = "{{ eos_token }}{{ tone }}{{ messages[0].content }}{{ enable_thinking }}"
    found = prompts(llm, HELLO, chat_template=template, chat_template_kwargs={"tone": "loud "})
    assert found == ["<|im_end|>loud hello"]
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompts(llm, HELLO, chat_template=template, **options) == ["<|im_end|>helloFalse"]
    assert prompts(llm, HELLO, **options) == [TEMPLATE.render(HELLO, enable_thinking=False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "can't set tools; it is an argument of its own"),
        ({"chat_template_kwargs": {"self": 1}}, "can't set self"),
        ({"chat_template_kwargs": {3: 1}}, "must map names to values"),
        ({"chat_template_kwargs": "x"}, "must map names to values"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": True},
            "enable_thinking is given twice",
        ),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "must be True, False or None"),
        ({"chat_template": 3}, "chat_template must be a template's text, not int"),
    ],
)
def test_wrong_options_are_refused(llm: LLM, options: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        chat(llm, HELLO, **options)


def test_a_template_that_does_not_compile_is_refused(llm: LLM):
    with pytest.raises(TokenizerError, match="chat_template line 1 is not a valid template"):
        chat(llm, HELLO, chat_template="{% if %}")


def test_a_checkpoint_without_a_template_says_what_to_do(llm: LLM, directory: Path):
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match=r"has no chat template; give chat\(\) one"):
        chat(llm, HELLO)
    assert prompts(llm, HELLO, chat_template="{{ messages[0].content }}") == ["hello"]
    (directory / "tokenizer_config.json").unlink()
    assert prompts(llm, HELLO, chat_template="{{ messages[0].content }}") == ["hello"]


def test_messages_are_not_changed(llm: LLM):
    message = {"role": "developer", "content": "the world"}
    chat(llm, [message, *HELLO])
    assert message == {"role": "developer", "content": "the world"}


def test_progress_is_shown_only_when_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]):
    chat(llm, HELLO)
    assert capsys.readouterr().err == ""
    llm.chat(HELLO, SHORT)
    assert "1/1" in capsys.readouterr().err


def test_after_close_chat_says_so(llm: LLM):
    llm.close()
    for options in ({}, {"chat_template": "x"}):
        with pytest.raises(ConfigError, match="this LLM is closed"):
            chat(llm, HELLO, **options)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"add_generation_prompt": "false"}, "add_generation_prompt must be True or False"),
        ({"chat_template": "some/chat_template.jinja"}, "has no expression in it"),
        ({"chat_template_kwargs": {"tokenize": True}}, "can't set tokenize"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "can't set chat_template"),
    ],
)
def test_an_option_that_could_only_be_ignored_is_refused(llm: LLM, option: Any, named: str):
    with pytest.raises(InvalidRequestError, match=named):
        llm.chat(HELLO, **option)
