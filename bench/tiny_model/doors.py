"""Three doors to the model for the same questions, and how many of its drafts would stand.

All answer greedily: `LLM.chat`, HTTP completions of the rendered prompt, and a loop over `forward`,
which keeps nothing between tokens and so shares no cache with the other two.
"""

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import uvicorn
from tqdm import tqdm

from bench.tiny_model.example import Example
from qwen35_jax.engine.thread import EngineThread
from qwen35_jax.errors import ConfigError, InvalidRequestError
from qwen35_jax.llm import LLM
from qwen35_jax.loading import LoadedEngine
from qwen35_jax.model.cache import init_state
from qwen35_jax.model.mtp import predict_hidden
from qwen35_jax.model.transformer import Qwen35, forward, hidden_states, unembed
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import IncrementalDecoder, Tokenizer
from serve.app import create_app
from serve.config import ServeConfig
from serve.engine_client import EngineClient

Array = jax.Array

HTTP_REQUESTS_AT_A_TIME = 32
HTTP_TIMEOUT_SECONDS = 600
PROBE_TIMEOUT_SECONDS = 10
FORWARD_ROWS = 16
# Rows are padded to a multiple of it, so that few lengths are compiled.
ROW_LENGTH_STEP = 128


@dataclass(frozen=True)
class Answer:
    """text: what the model says. prompt_ids, ids: the tokens, empty where the door gives none."""

    text: str
    prompt_ids: Sequence[int] = ()
    ids: Sequence[int] = ()


def ask_chat(llm: LLM, examples: Sequence[Example], *, max_tokens: int) -> list[Answer]:
    """All at once through LLM.chat. Raises InvalidRequestError where an example can't run."""
    results = llm.chat(
        [example["messages"] for example in examples],
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
        tools=[example["tools"] or None for example in examples],
        enable_thinking=[example["enable_thinking"] for example in examples],
    )
    answers = []
    for result in results:
        if result.error is not None:
            raise InvalidRequestError(result.error)
        (output,) = result.outputs
        answers.append(Answer(output.text, result.prompt_token_ids, output.token_ids))
    return answers


def check_server(base_url: str, model_name: str) -> None:
    """Raise ConfigError unless the server there is up and serves a model of this name."""
    answer = _http_json(f"{base_url.rstrip('/')}/v1/models", timeout=PROBE_TIMEOUT_SECONDS)
    try:
        served = [model["id"] for model in answer["data"]]
    except (LookupError, TypeError):
        raise ConfigError(f"{base_url} answered a request for its models with none") from None
    if model_name not in served:
        raise ConfigError(
            f"{base_url} serves {', '.join(map(str, served))}, not {model_name}: give --model, or "
            f"start the server with --served-model-name {model_name}"
        )


def _http_json(url: str, body: object = None, *, timeout: float = HTTP_TIMEOUT_SECONDS) -> Any:
    """GET, or POST of `body`. Raises ConfigError for everything that can be wrong there."""
    # Not through a proxy, which could not reach this machine's own server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(
            url,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with opener.open(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        reason = f"status {error.code}, {error.read().decode(errors='replace'):.200}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(f"{url} doesn't answer (is it http://HOST:PORT?): {reason}")


def ask_http(base_url: str, prompts: Sequence[str], *, max_tokens: int) -> list[Answer]:
    """Through POST /v1/completions. Raises ConfigError where the server doesn't answer so."""

    def ask(prompt: str) -> Answer:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        answer = _http_json(f"{base_url.rstrip('/')}/v1/completions", body)
        try:
            text = answer["choices"][0]["text"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f"{base_url} answered a completion request without a text")
        return Answer(text)

    with ThreadPoolExecutor(HTTP_REQUESTS_AT_A_TIME) as threads:
        return list(tqdm(threads.map(ask, prompts), total=len(prompts), desc="HTTP requests"))


@contextmanager
def serving(loaded: LoadedEngine) -> Iterator[str]:
    """Serve on a free port of this machine, from another thread; gives the base URL.

    The engine is the server's from here on, and closed after it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, EngineThread(loaded.engine) as engine:
        port = listener.getsockname()[1]
        app = create_app(
            config=ServeConfig(served_model_name=loaded.model_name, port=port),
            client=EngineClient(engine),
            tokenizer=loaded.tokenizer,
            max_model_len=loaded.max_model_len,
        )
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


def ask_forward(
    params: Qwen35,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
) -> list[Answer]:
    """The likeliest next token of `forward` over the whole row, again and again.

    prompts: token ids. Rows are independent and padded on the right; one that has ended makes room
    for the next.
    """
    stop_ids = {*params.config.eos_token_ids, *tokenizer.eos_token_ids}
    sequences = [list(prompt) for prompt in prompts]
    # Rows of about one length run together.
    waiting = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    running: list[int] = []
    with tqdm(total=len(prompts), desc="forward") as bar:
        while waiting or running:
            while waiting and len(running) < FORWARD_ROWS:
                running.append(waiting.pop())
            ids, lengths = _padded([sequences[place] for place in running])
            chosen = np.asarray(
                _next_ids(params, ids, lengths, vocabulary_size=tokenizer.vocabulary_size)
            )
            for place, token_id in zip(list(running), chosen.tolist(), strict=False):
                sequences[place].append(token_id)
                generated = len(sequences[place]) - len(prompts[place])
                if token_id in stop_ids or generated == max_tokens:
                    running.remove(place)
                    bar.update()
    answers = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        ids = sequence[len(prompt) :]
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
        stopped = ids[-1] in stop_ids
        text = decoder.push(ids[:-1] if stopped else ids) + decoder.finish(cut=not stopped)
        answers.append(Answer(text, prompt, ids))
    return answers


def draft_acceptance(
    params: Qwen35, answers: Sequence[Answer], *, vocabulary_size: int
) -> tuple[int, int]:
    """(accepted, drafted) of the multi-token prediction layer's first draft.

    params: with `mtp`. A draft is made after each token of an answer but its last, from the hidden
    state behind that token, and is accepted where the model itself chose the same next token.
    """
    accepted = drafted = 0
    for start in tqdm(range(0, len(answers), FORWARD_ROWS), desc="drafts", unit="batch"):
        group = answers[start : start + FORWARD_ROWS]
        ids, _ = _padded([[*answer.prompt_ids, *answer.ids] for answer in group])
        drafts = np.asarray(_draft_ids(params, ids, vocabulary_size=vocabulary_size))
        for row, answer in zip(drafts, group, strict=False):
            chosen = list(answer.ids[1:])
            first = len(answer.prompt_ids) - 1
            accepted += int(np.sum(row[first : first + len(chosen)] == chosen))
            drafted += len(chosen)
    return accepted, drafted


@partial(jax.jit, static_argnames="vocabulary_size")
def _next_ids(params: Qwen35, ids: Array, lengths: Array, *, vocabulary_size: int) -> Array:
    """ids: [B, T], lengths: [B] -> the likeliest id after each row, [B]."""
    logits = forward(params, ids)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return last[:, :vocabulary_size].argmax(-1)


@partial(jax.jit, static_argnames="vocabulary_size")
def _draft_ids(params: Qwen35, ids: Array, *, vocabulary_size: int) -> Array:
    """ids: [B, T] -> [B, T - 1], at t the draft of token t + 2."""
    hidden, _ = hidden_states(params, ids, init_state(params.config, *ids.shape))
    drafted, _ = predict_hidden(params, hidden[:, :-1], ids[:, 1:])
    return unembed(params, drafted)[..., :vocabulary_size].argmax(-1)


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """ids [FORWARD_ROWS, T] int32 with zeros behind each row, and the rows' lengths.

    Rows beyond the sequences have length 1.
    """
    longest = max(map(len, sequences))
    length = -(-longest // ROW_LENGTH_STEP) * ROW_LENGTH_STEP
    ids = np.zeros((FORWARD_ROWS, length), np.int32)
    lengths = np.ones((FORWARD_ROWS,), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return ids, lengths
