"""The doors to the model: the same texts through each, and how drafts are counted."""

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.tiny_model import doors
from bench.tiny_model.doors import (
    Answer,
    ask_chat,
    ask_forward,
    ask_http,
    check_server,
    draft_acceptance,
    serving,
)
from bench.tiny_model.example import Example
from qwen35_jax.checkpoint import fill_parameters, named_parameters
from qwen35_jax.errors import ConfigError, InvalidRequestError
from qwen35_jax.llm import LLM
from qwen35_jax.model.cache import init_state
from qwen35_jax.model.mtp import predict_hidden
from qwen35_jax.model.transformer import Qwen35, hidden_states, unembed
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import fast_compilation, two_layer_params, write_two_layer_checkpoint

MAX_TOKENS = 8
WORDS = ("hello", "the world", "what is it?", "a b c", "1 + 1", "why?", "user")


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def example(question: str, *, thinking: bool = True) -> Example:
    return Example(
        skill="sum",
        messages=[{"role": "user", "content": question}],
        tools=[],
        enable_thinking=thinking,
        target="",
        answer={"kind": "number", "value": 1},
    )


EXAMPLES = [example(word, thinking=len(word) % 2 == 0) for word in WORDS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in float32 that ends some of its answers before MAX_TOKENS."""
    path = write_two_layer_checkpoint(tmp_path_factory.mktemp("tiny"))
    config_path = path / "config.json"
    config = json.loads(config_path.read_text())
    with LLM(path, dtype="float32") as llm:
        answers = ask_chat(llm, EXAMPLES, max_tokens=MAX_TOKENS)
    third_ids = [answer.ids[2] for answer in answers if len(answer.ids) > 2]
    config["text_config"]["eos_token_id"] = third_ids[:2]
    config_path.write_text(json.dumps(config))
    return path


@pytest.fixture
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, dtype="float32") as opened:
        yield opened


def test_chat_http_and_forward_say_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "FORWARD_ROWS", 3)  # fewer than there are questions
    chat = ask_chat(llm, EXAMPLES, max_tokens=MAX_TOKENS)
    ids = [answer.prompt_ids for answer in chat]
    forward = ask_forward(llm.params, llm.tokenizer, ids, max_tokens=MAX_TOKENS)
    assert forward == chat
    lengths = {len(answer.ids) for answer in chat}
    assert MAX_TOKENS in lengths and min(lengths) < MAX_TOKENS
    prompts = [llm.tokenizer.decode(one, skip_special_tokens=False) for one in ids]
    with serving(llm.loaded) as base_url:
        http = ask_http(base_url, prompts, max_tokens=MAX_TOKENS)
    assert http == [Answer(answer.text) for answer in chat]
    assert len({answer.text for answer in http}) > 1


def test_forward_says_what_the_engine_says_at_any_length(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "FORWARD_ROWS", 4)
    source = random.Random(0)
    # From a token to rows that grow past a multiple of ROW_LENGTH_STEP.
    prompts = [source.choices(range(250), k=length) for length in (124, 1, 7, 128, 60, 129)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    results = llm.generate(prompts, params, use_tqdm=False)
    forward = ask_forward(llm.params, llm.tokenizer, prompts, max_tokens=MAX_TOKENS)
    assert forward == [
        Answer(result.outputs[0].text, prompt, result.outputs[0].token_ids)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    assert len({answer.text for answer in forward}) > 3


def test_chat_asks_with_each_examples_tools_and_thinking(monkeypatch: pytest.MonkeyPatch, llm: LLM):
    asked: dict[str, Any] = {}

    def chat(self: LLM, messages: Any, params: SamplingParams, **options: Any) -> list[Any]:
        asked.update(options, messages=messages, params=params)
        return []

    monkeypatch.setattr(LLM, "chat", chat)
    tool = {"type": "function", "function": {"name": "x"}}
    with_tool = Example(**{**example("hello", thinking=False), "tools": [tool]})
    assert ask_chat(llm, [with_tool, example("why?")], max_tokens=5) == []
    assert asked["messages"] == [with_tool["messages"], [{"role": "user", "content": "why?"}]]
    assert (asked["tools"], asked["enable_thinking"]) == ([[tool], None], [False, True])
    assert asked["params"] == SamplingParams(temperature=0.0, max_tokens=5)


def test_an_example_that_can_not_run_is_an_error(llm: LLM):
    with pytest.raises(InvalidRequestError, match="context holds"):
        ask_chat(llm, [example("hello"), example("x" * 9000)], max_tokens=2)


class Refusing(BaseHTTPRequestHandler):
    """Answers every completion request with a status and a body of the class."""

    status = 400
    body = b'{"error": {"message": "no such model"}}'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, b'{"error": "no such model"}', "status 400, .*no such model"),
        (200, b"<html>", "JSONDecodeError"),
    ],
)
def test_a_server_that_gives_no_completion_is_named(
    status: int, body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Refusing, "status", status)
    monkeypatch.setattr(Refusing, "body", body)
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(ConfigError, match=f"{url}.* doesn't answer .*: {reason}"):
                ask_http(url, ["hello"], max_tokens=1)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b'{"choices": []}', b"[1]", b'{"choices": [{"text": null}]}'])
def test_an_answer_without_text_is_named(body: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.tiny_model.doors._http_json", lambda *_, **__: json.loads(body))
    with pytest.raises(ConfigError, match="without a text"):
        ask_http("http://x", ["hello"], max_tokens=1)


@pytest.mark.parametrize(
    "url", ["", "localhost", "127.0.0.1:8000", "http://127.0.0.1:x", "http://a b"]
)
def test_what_is_no_url_is_named(url: str):
    with pytest.raises(ConfigError, match="is it http://HOST:PORT"):
        ask_http(url, ["hello"], max_tokens=1)


def test_a_server_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch):
    served = {"data": [{"id": "other"}]}
    monkeypatch.setattr("bench.tiny_model.doors._http_json", lambda *_, **__: served)
    check_server("http://x", "other")
    with pytest.raises(ConfigError, match="serves other, not mine"):
        check_server("http://x", "mine")
    served.clear()
    with pytest.raises(ConfigError, match="with none"):
        check_server("http://x", "mine")


def test_no_server_at_all_is_named(monkeypatch: pytest.MonkeyPatch):
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    with pytest.raises(ConfigError, match="refused"):
        ask_http(url, ["hello"], max_tokens=1)


@pytest.fixture(scope="module")
def params_with_mtp() -> Qwen35:
    model = two_layer_params()
    leaves = dict(named_parameters(model))
    abstract = Qwen35(model.config, mtp=True)
    for index, (path, leaf) in enumerate(named_parameters(abstract)):
        if path.startswith("mtp."):
            key = jax.random.fold_in(jax.random.key(0), index)
            leaves[path] = 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype)
    return fill_parameters(abstract, leaves)


@jax.jit
def drafts_in(params: Qwen35, row: jax.Array) -> jax.Array:
    """row: [1, T] ids -> logits of what is drafted after each but the first, [T - 1, V]."""
    hidden, _ = hidden_states(params, row, init_state(params.config, *row.shape))
    drafted, _ = predict_hidden(params, hidden[:, :-1], row[:, 1:])
    return unembed(params, drafted)[0]


def draft_after(params: Qwen35, ids: list[int], vocabulary_size: int) -> int:
    """The draft that the layer makes of the last id and the hidden state before it."""
    padded = jnp.zeros((1, 16), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
    return int(drafts_in(params, padded)[len(ids) - 2, :vocabulary_size].argmax())


def drafted_answer(params: Qwen35, prompt: list[int], first: int, length: int) -> Answer:
    """An answer whose every token after the first is what would have been drafted."""
    ids = [*prompt, first]
    while len(ids) < len(prompt) + length:
        ids.append(draft_after(params, ids, 100))
    return Answer("", prompt, ids[len(prompt) :])


def test_drafts_are_counted_after_each_token_of_an_answer_but_its_last(
    params_with_mtp: Qwen35, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doors, "FORWARD_ROWS", 2)
    answers = [
        drafted_answer(params_with_mtp, [5, 6, 7], 1, 6),
        drafted_answer(params_with_mtp, [9], 2, 4),
        Answer("", [3, 4], [8]),
    ]
    assert draft_acceptance(params_with_mtp, answers, vocabulary_size=100) == (8, 8)
    *start, last = answers[0].ids
    wrong = Answer("", answers[0].prompt_ids, [*start, (last + 1) % 100])
    assert draft_acceptance(params_with_mtp, [wrong], vocabulary_size=100) == (4, 5)
