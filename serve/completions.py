"""POST /v1/completions: prompts in, text out, whole or streamed."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from qwen35_jax.engine.request import FinishReason, Request, TokenOutput
from qwen35_jax.engine.text_stream import TextStream
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer
from serve.engine_client import Generation
from serve.errors import CLIENT_CLOSED_REQUEST, ApiError
from serve.logprobs import LogprobsWriter, empty_logprobs, extend_logprobs
from serve.models import served_model
from serve.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    StreamOptions,
    Usage,
    parse_request,
)
from serve.request_body import read_json_object
from serve.streaming import (
    DONE_EVENT,
    EventStream,
    background,
    close_on_disconnect,
    error_event,
    event,
)

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
# More text is encoded beside the event loop, which it would hold up for milliseconds.
MAX_INLINE_CHARACTERS = 8192


async def create_completion(request: HttpRequest) -> Response:
    model = served_model(request)
    body = await read_json_object(request, max_bytes=model.config.max_body_bytes)
    fields = parse_request(body, CompletionRequest)
    model.check_name(fields.model)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    params = _sampling_params(fields, model.tokenizer)
    prompts = await _encode_prompts(fields.prompt, model.tokenizer, model.max_model_len)
    limits = [_token_limit(len(ids), fields.max_tokens, model.max_model_len) for ids in prompts]
    # Each new SamplingParams checks everything again, which takes long with many stop tokens.
    params_by_limit = {limit: replace(params, max_tokens=limit) for limit in set(limits)}
    all_params = [params_by_limit[limit] for limit in limits]
    reply = _Reply(model.name, prompts, all_params, model.tokenizer)
    generation = await model.client.generate(reply.requests)
    if fields.stream:
        return EventStream(
            _events(reply, generation, fields.stream_options or StreamOptions()),
            generation,
            keep_alive_seconds=model.config.keep_alive_seconds,
        )
    return await _whole_response(request, reply, generation)


class _Choice:
    """One prompt's answer as it comes."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self._text = TextStream(tokenizer, params)
        self._logprobs_writer = (
            None
            if params.logprobs is None
            else LogprobsWriter(tokenizer, skip_special_tokens=params.skip_special_tokens)
        )

    def push(self, output: TokenOutput) -> CompletionChoice:
        """What `output` adds to the choice."""
        delta = self._text.push(output)
        self.completion_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        logprobs = None
        if self._logprobs_writer is not None:
            logprobs = self._logprobs_writer.write(delta.token_ids, delta.logprobs or ())
        return CompletionChoice(
            self.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason
        )


class _Reply:
    """One HTTP request's choices, one a prompt."""

    def __init__(
        self,
        model_name: str,
        prompts: Sequence[Sequence[int]],
        all_params: Sequence[SamplingParams],
        tokenizer: Tokenizer,
    ):
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model_name = model_name
        self._prompt_tokens = sum(map(len, prompts))
        self.requests = [
            Request(f"{self._id}-{index}", tuple(ids), params)
            for index, (ids, params) in enumerate(zip(prompts, all_params, strict=True))
        ]
        self._choices = {
            request.request_id: _Choice(index, request.params, tokenizer)
            for index, request in enumerate(self.requests)
        }

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def usage(self) -> Usage:
        completion_tokens = sum(choice.completion_tokens for choice in self._choices.values())
        return Usage(
            self._prompt_tokens, completion_tokens, self._prompt_tokens + completion_tokens
        )

    def push(self, output: TokenOutput, generation: Generation) -> CompletionChoice:
        """What `output` adds to its choice. Raises ApiError when the engine reports a failure."""
        if output.finish_reason == "error":
            raise ApiError(500, output.error or "generation failed", code="engine_error")
        try:
            delta = self._choices[output.request_id].push(output)
        except InvalidRequestError as error:
            # An id that the tokenizer doesn't know: the engine's fault here, not the client's.
            raise ApiError(500, f"the engine failed: {error}", code="engine_error") from error
        if delta.finish_reason is not None and output.finish_reason is None:
            generation.drop(output.request_id)
        return delta

    def response(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model_name,
            choices=choices,
            usage=usage,
        )


async def _whole_response(request: HttpRequest, reply: _Reply, generation: Generation) -> Response:
    texts: list[list[str]] = [[] for _ in reply.requests]
    choices = [CompletionChoice(index, "", None, None, None) for index in range(len(texts))]
    try:
        async with background(close_on_disconnect(request.receive, generation)):
            async for output in generation:
                delta = reply.push(output, generation)
                texts[delta.index].append(delta.text)
                _extend(choices[delta.index], delta)
    finally:
        generation.close()
    if not reply.is_finished:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    for choice, pieces in zip(choices, texts, strict=True):
        choice.text = "".join(pieces)
    whole = reply.response(choices, reply.usage)
    return Response(msgspec.json.encode(whole), media_type="application/json")


def _extend(choice: CompletionChoice, delta: CompletionChoice) -> None:
    if delta.logprobs is not None:
        choice.logprobs = choice.logprobs or empty_logprobs()
        extend_logprobs(choice.logprobs, delta.logprobs)
    choice.finish_reason = delta.finish_reason
    choice.stop_reason = delta.stop_reason


async def _events(
    reply: _Reply, generation: Generation, options: StreamOptions
) -> AsyncGenerator[bytes]:
    try:
        async for output in generation:
            delta = reply.push(output, generation)
            has_logprobs = delta.logprobs is not None and delta.logprobs.tokens
            if delta.text or has_logprobs or delta.finish_reason is not None:
                yield event(reply.response([delta], _chunk_usage(reply, options)))
    except ApiError as error:
        yield error_event(str(error), code=error.code)
        return
    if not reply.is_finished:
        return
    if options.include_usage:
        yield event(reply.response([], reply.usage))
    yield DONE_EVENT


def _chunk_usage(reply: _Reply, options: StreamOptions) -> Usage | UnsetType | None:
    if options.continuous_usage_stats:
        return reply.usage
    return None if options.include_usage else UNSET


def _sampling_params(fields: CompletionRequest, tokenizer: Tokenizer) -> SamplingParams:
    _check_ids("stop_token_ids", fields.stop_token_ids, tokenizer.vocabulary_size)
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        max_tokens=fields.max_tokens,
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        logprobs=fields.logprobs,
        skip_special_tokens=fields.skip_special_tokens,
    )


async def _encode_prompts(
    prompt: str | list[str | int | list[int]], tokenizer: Tokenizer, max_model_len: int
) -> list[list[int]]:
    """Each prompt's ids.

    Raises InvalidRequestError for too many, and for one that is empty, out of range or so long
    that no encoding of it fits.
    """
    if isinstance(prompt, str):
        return await _encode_texts({"prompt": prompt}, tokenizer, max_model_len)
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        _check_ids("prompt", ids, tokenizer.vocabulary_size)
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts; send at most {MAX_PROMPTS} in a request",
            param="prompt",
            code="too_many_prompts",
        )
    texts = [item for item in prompt if isinstance(item, str)]
    if texts and len(texts) == len(prompt):
        named = {f"prompt[{index}]": text for index, text in enumerate(texts)}
        return await _encode_texts(named, tokenizer, max_model_len)
    lists = [item for item in prompt if isinstance(item, list)]
    if prompt and len(lists) < len(prompt):
        raise InvalidRequestError(
            "prompt must hold only strings, only token ids or only lists of token ids",
            param="prompt",
            code="invalid_type",
        )
    if not prompt:
        raise _empty("prompt")
    for index, item in enumerate(lists):
        _check_ids(f"prompt[{index}]", item, tokenizer.vocabulary_size)
        if not item:
            raise _empty(f"prompt[{index}]")
    return lists


async def _encode_texts(
    texts: Mapping[str, str], tokenizer: Tokenizer, max_model_len: int
) -> list[list[int]]:
    if tokenizer.longest_token_bytes is not None:
        fitting_bytes = max_model_len * tokenizer.longest_token_bytes
        for text in texts.values():
            # A character has four bytes at most.
            if 4 * len(text) > fitting_bytes and len(text.encode()) > fitting_bytes:
                raise _too_long(f"more than {max_model_len}", max_model_len)

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text) for text in texts.values()]

    if sum(map(len, texts.values())) <= MAX_INLINE_CHARACTERS:
        all_ids = encode_all()
    else:
        all_ids = await asyncio.to_thread(encode_all)
    for name, ids in zip(texts, all_ids, strict=True):
        if not ids:
            raise _empty(name)
    return all_ids


def _empty(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} is empty; it must hold at least one token", param="prompt", code="empty_prompt"
    )


def _too_long(prompt_tokens: str, max_model_len: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the prompt has {prompt_tokens} tokens, but the context holds {max_model_len} "
        "with the answer; shorten the prompt",
        param="prompt",
        code="context_length_exceeded",
    )


def _check_ids(name: str, ids: Sequence[int], vocabulary_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary_size):
        token_id = next(token_id for token_id in ids if not 0 <= token_id < vocabulary_size)
        raise InvalidRequestError(
            f"{name}: token id {token_id} is not in [0, {vocabulary_size})",
            param=name.partition("[")[0],
            code="token_id_out_of_range",
        )


def _token_limit(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens to generate: what was asked, or the default as far as there is room."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise _too_long(str(prompt_tokens), max_model_len)
    if max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if max_tokens > room:
        raise InvalidRequestError(
            f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} are more than the "
            f"{max_model_len} tokens that the context holds; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return max_tokens
