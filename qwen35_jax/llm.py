"""The model as a library.

    llm = LLM()
    for result in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=32)):
        print(result.outputs[0].text)

`chat` takes conversations. One engine serves all calls; a prompt that can't run fails alone.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tqdm import tqdm

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.config import EngineConfig
from qwen35_jax.conversations import (
    Conversation,
    Tools,
    as_conversations,
    render_conversations,
    template_from_text,
)
from qwen35_jax.engine.request import Engine, Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.text_stream import TextDelta, TextStream
from qwen35_jax.errors import ConfigError, InvalidRequestError, TokenizerError
from qwen35_jax.loading import LoadedEngine, load_engine
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.outputs import CompletionOutput, RequestOutput
from qwen35_jax.prompts import Prompt, as_prompts, one_a_prompt, prompt_ids
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer


class GenerationError(RuntimeError):
    """The engine failed while it ran a request, most likely for want of device memory."""


class LLM:
    """A loaded model that generates text. Options are EngineConfig's; LLM() is the default model.

    A context manager: leaving it, or close(), gives the device memory back.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any):
        name = None if model is None else os.fspath(model)
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(unknown)}; there are "
                f"{', '.join(EngineConfig.__dataclass_fields__)}"
            )
        self._open(EngineConfig(model=name, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        self._loaded: LoadedEngine | None = load_engine(config)
        self._template: ChatTemplate | None = None
        self._request_numbers = count()
        # Held while the engine is touched; a thread may generate between its own stream's deltas.
        self._lock = threading.RLock()
        # Outputs of open streams that they have not taken yet.
        self._streams: dict[str, deque[TokenOutput]] = {}

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the device memory back. The LLM can't be used after it."""
        if self._loaded is not None:
            self._loaded.engine.close()
            self._loaded = None

    @property
    def loaded(self) -> LoadedEngine:
        if self._loaded is None:
            raise ConfigError("this LLM is closed; make a new one")
        return self._loaded

    @property
    def params(self) -> Qwen35:
        """The weights, a pytree for `forward`, `prefill` and `decode`."""
        return self.loaded.params

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's own. Raises TokenizerError where it has none, or one that is wrong."""
        directory = self.loaded.directory
        if self._template is None:
            self._template = ChatTemplate.from_directory(directory)
        if self._template is None:
            raise TokenizerError(
                f"{directory} has no chat template; give chat() one as chat_template, or "
                "generate() the whole prompt"
            )
        return self._template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); results are in the prompts' order.

        sampling_params: one for all, or one a prompt. A prompt that can't run gives a
        RequestOutput with `error` set; the others are not affected. Threads take turns.
        """
        prompts = as_prompts(prompts)
        params = one_a_prompt(sampling_params, len(prompts))
        # The engine is one thread's at a time.
        with self._lock:
            return self._generate(self.loaded.engine, prompts, params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Tools | Sequence[Tools | None] | None = None,
        enable_thinking: bool | Sequence[bool | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation: `generate` on the prompt that the chat template makes of it.

            result = llm.chat([{"role": "user", "content": "Hello"}])[0]
            print(result.outputs[0].text)

        The text is all that the model says, with a thinking model's thoughts up to </think>.
        Special tokens in the messages' text are what they are: text from others that may hold
        <|im_end|> should be stripped of it first.

        messages: a conversation, which is a list of OpenAI chat messages, or a list of them.
        sampling_params: one for all, or one a conversation. The default one ends after 16 tokens:
            give max_tokens, or max_tokens=None for answers up to the end of the context.
        chat_template: a Jinja template's text in the place of the checkpoint's.
        add_generation_prompt: end the prompt with the start of the assistant's turn.
        tools: OpenAI tool definitions for all, or a list with one such list a conversation.
        enable_thinking: whether to think first, for all or one a conversation; None leaves it to
            the template.
        chat_template_kwargs: more names for the template, for all.

        A conversation that the template refuses gives a RequestOutput with `error` set; the others
        are not affected. Raises TokenizerError where the template is missing or doesn't compile,
        InvalidRequestError for options that fit no conversation.
        """
        conversations = as_conversations(messages)
        params = one_a_prompt(sampling_params, len(conversations))
        if chat_template is None:
            template = self.chat_template
        else:
            template = template_from_text(chat_template, self.loaded.directory)
        prompts = render_conversations(
            template,
            conversations,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            template_kwargs=chat_template_kwargs,
        )
        texts = {place: prompt for place, prompt in enumerate(prompts) if isinstance(prompt, str)}
        answers = self.generate(
            list(texts.values()), [params[place] for place in texts], use_tqdm=use_tqdm
        )
        answer_at = dict(zip(texts, answers, strict=True))
        return [
            answer_at.get(place)
            or RequestOutput(self._next_request_id(), None, [], error=str(prompt))
            for place, prompt in enumerate(prompts)
        ]

    def _generate(
        self,
        engine: Engine,
        prompts: list[Any],
        params: list[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        results: dict[str, _Result] = {}
        ordered: list[_Result] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request_id = self._next_request_id()
                result = _Result(request_id, prompt, one, self.tokenizer)
                ordered.append(result)
                try:
                    result.token_ids = prompt_ids(prompt, self.tokenizer)
                    results[request_id] = result
                    engine.submit(Request(request_id, tuple(result.token_ids), one))
                except InvalidRequestError as error:
                    results.pop(request_id, None)
                    result.error = str(error)
            self._run(engine, results, use_tqdm)
        finally:
            for request_id in results:
                engine.abort(request_id)
        return [result.output() for result in ordered]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Complete one prompt, giving the text as it comes. Closing the iterator ends the request.

        Several streams may be open at once, in any threads, and generate() may run between their
        deltas.

        Raises InvalidRequestError for a prompt that can't run, GenerationError (from the iterator)
        when the engine fails.
        """
        (params,) = one_a_prompt(sampling_params, 1)
        ids = tuple(prompt_ids(prompt, self.tokenizer))
        request = Request(self._next_request_id(), ids, params)
        deltas = self._deltas(self.loaded.engine, request, TextStream(self.tokenizer, params))
        # A generator that was never started would not run its `finally` when it is closed.
        next(deltas)
        return deltas

    def _deltas(self, engine: Engine, request: Request, text: TextStream) -> Iterator[TextDelta]:
        """Submit, then give an empty delta; after it those of the text."""
        with self._lock:
            engine.submit(request)
            outputs = self._streams[request.request_id] = deque()
        try:
            yield TextDelta()
            while not text.finished:
                with self._lock:
                    while not outputs and engine.has_work():
                        self._step(engine)
                if not outputs:
                    raise GenerationError("the engine lost this request: a step was interrupted")
                output = outputs.popleft()
                if output.finish_reason == "error":
                    raise GenerationError(output.error)
                yield text.push(output)
        finally:
            with self._lock:
                del self._streams[request.request_id]
                engine.abort(request.request_id)

    def _next_request_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    def _step(self, engine: Engine) -> list[TokenOutput]:
        """Step the engine. Open streams get their outputs, the caller the others."""
        others: list[TokenOutput] = []
        for output in engine.step():
            self._streams.get(output.request_id, others).append(output)
        return others

    def _run(self, engine: Engine, running: dict[str, "_Result"], use_tqdm: bool) -> None:
        """Step the engine until every request has ended."""
        ended = 0
        with tqdm(total=len(running), desc="Generating", disable=not use_tqdm) as bar:
            while ended < len(running) and engine.has_work():
                for output in self._step(engine):
                    result = running.get(output.request_id)
                    if result is None or result.finished:
                        continue
                    delta = result.text.push(output)
                    result.logprobs.extend(delta.logprobs or ())
                    result.error = output.error
                    if delta.finish_reason is None:
                        continue
                    result.last = delta
                    ended += 1
                    bar.update()
                    if output.finish_reason is None:  # a stop string, which only the text shows
                        engine.abort(output.request_id)


@dataclass
class _Result:
    """One prompt on its way to a RequestOutput."""

    request_id: str
    prompt: object
    params: SamplingParams
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = TextStream(self.tokenizer, self.params)
        self.logprobs: list[TokenLogprobs] = []
        self.last: TextDelta | None = None
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None

    def output(self) -> RequestOutput:
        outputs = []
        if self.last is not None and self.last.finish_reason is not None and self.error is None:
            completion = CompletionOutput(
                index=0,
                text=self.text.text,
                token_ids=list(self.text.token_ids),
                finish_reason=self.last.finish_reason,
                stop_reason=self.last.stop_reason,
                logprobs=None if self.params.logprobs is None else self.logprobs,
            )
            outputs.append(completion)
        prompt = self.prompt if isinstance(self.prompt, str) else None
        return RequestOutput(self.request_id, prompt, self.token_ids, outputs, self.error)
