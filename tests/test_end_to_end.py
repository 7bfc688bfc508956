"""The real server on the embedded model, in a process of its own, against the library."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.outputs import CompletionOutput
from qwen35_jax.sampling_params import SamplingParams
from tests.serve.harness import error_of, events_of
from tests.support.engines import default_llm, fast_compilation

REPOSITORY = Path(__file__).parents[1]
CONTEXT = 64
# Starting compiles the model; a busy machine takes its time.
START_SECONDS = 120
VOCABULARY_SIZE = 3553

PROMPT = ChatTemplate.built_in().render(
    [{"role": "user", "content": "What is the capital of France?"}], enable_thinking=False
)
GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """One server for all tests, which SIGTERM ends with exit code 0 and no traceback."""
    flags = ["serve", "--port", "0", "--max-model-len", str(CONTEXT)]
    with subprocess.Popen(
        [sys.executable, "-m", "qwen35_jax.cli", *flags],
        cwd=REPOSITORY,
        # As fast_compilation() compiles here, so that the same numbers come out.
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            _, ready, _ = (process.stdout.readline() for _ in range(3))
            found = re.fullmatch(r"Ready: qwen3\.5-tiny at (http://127\.0\.0\.1:\d+)\n", ready)
            assert found, ready
            with httpx.Client(base_url=found[1], timeout=START_SECONDS) as http:
                yield http
            # Here rather than in a test, which would have to be the last.
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=30)
            assert (process.returncode, out) == (0, ""), errors
            assert "Traceback" not in errors
            assert "error" not in errors.lower()
        finally:
            process.kill()


def complete(server: httpx.Client, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", json=fields)


def expected(**params: Any) -> CompletionOutput:
    (result,) = default_llm().generate(PROMPT, SamplingParams(**params), use_tqdm=False)
    return result.outputs[0]


def assert_streams_as_a_whole(server: httpx.Client, **fields: Any) -> dict[str, Any]:
    (whole,) = complete(server, **fields).json()["choices"]
    streamed = complete(server, **fields, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(streamed.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends == [None] * (len(ends) - 1) + [whole["finish_reason"]]
    assert chunks[-1]["choices"][0]["stop_reason"] == whole["stop_reason"]
    return whole


def test_the_server_is_healthy_and_names_its_model(server: httpx.Client):
    assert server.get("/health").status_code == 200
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("qwen3.5-tiny", CONTEXT)


def test_an_answer_is_the_librarys(server: httpx.Client):
    output = expected(temperature=0, max_tokens=8)
    body = complete(server, **GREEDY).json()
    assert body["choices"] == [
        {
            "index": 0,
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
    ]
    asked, answered = len(default_llm().tokenizer.encode(PROMPT)), len(output.token_ids)
    assert body["usage"] == {
        "prompt_tokens": asked,
        "completion_tokens": answered,
        "total_tokens": asked + answered,
    }


def test_a_prompt_of_ids_is_the_same_prompt(server: httpx.Client):
    ids = default_llm().tokenizer.encode(PROMPT)
    by_ids = complete(server, **GREEDY | {"prompt": ids}).json()
    assert by_ids["choices"] == complete(server, **GREEDY).json()["choices"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_tokens": 5}, {"temperature": 1.0, "seed": 3}],
    ids=["greedy", "cut", "seeded"],
)
def test_a_streamed_answer_is_the_whole_one(server: httpx.Client, fields: dict[str, Any]):
    assert_streams_as_a_whole(server, **GREEDY | fields)


def test_a_streamed_answer_with_a_stop_string_is_the_whole_one(server: httpx.Client):
    stop = expected(temperature=0, max_tokens=8).text[3:6]
    whole = assert_streams_as_a_whole(server, **GREEDY, stop=stop)
    assert whole["stop_reason"] == stop


def test_a_seeded_answer_is_the_librarys(server: httpx.Client):
    output = expected(temperature=1.0, seed=3, max_tokens=8)
    (choice,) = complete(server, **GREEDY | {"temperature": 1.0, "seed": 3}).json()["choices"]
    assert choice["text"] == output.text


@pytest.mark.parametrize(
    ("prompt", "message", "code"),
    [
        ("", "prompt is empty; it must hold at least one token", "empty_prompt"),
        (
            [1] * CONTEXT,
            f"the prompt has {CONTEXT} tokens, but the context holds {CONTEXT} with the answer; "
            "shorten the prompt",
            "context_length_exceeded",
        ),
        (
            [VOCABULARY_SIZE],
            f"prompt: token id {VOCABULARY_SIZE} is not in [0, {VOCABULARY_SIZE})",
            "token_id_out_of_range",
        ),
        (
            [1, -1],
            f"prompt: token id -1 is not in [0, {VOCABULARY_SIZE})",
            "token_id_out_of_range",
        ),
    ],
    ids=["empty", "over_the_context", "out_of_range", "negative"],
)
def test_prompts_that_cannot_run_are_400_with_the_error_object(
    server: httpx.Client, prompt: Any, message: str, code: str
):
    response = complete(server, **GREEDY | {"prompt": prompt})
    assert response.status_code == 400
    assert error_of(response) == {
        "message": message,
        "type": "invalid_request_error",
        "param": "prompt",
        "code": code,
    }
    assert complete(server, **GREEDY).status_code == 200
