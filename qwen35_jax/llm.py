"""The model as a library.

    llm = LLM()
    for result in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=32)):
        print(result.outputs[0].text)

`chat` takes conversations. One engine serves all calls; a prompt that can't run fails alone.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.config import EngineConfig
from qwen35_jax.conversations import (
    Conversation,
    Tools,
    as_conversations,
    render_conversations,
    template_from_text,
)
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.shared import SharedEngine
from qwen35_jax.engine.stats import EngineStats
from qwen35_jax.engine.text_stream import TextDelta, TextStream
from qwen35_jax.errors import ConfigError, InvalidRequestError, TokenizerError
from qwen35_jax.generation_batch import GenerationBatch
from qwen35_jax.loading import LoadedEngine, load_engine
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.outputs import RequestOutput
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
        self._shared = SharedEngine(self._loaded.engine)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the device memory back. The LLM can't be used after it.

        What other threads and tasks still generate ends with finish_reason "abort" and the text so
        far.
        """
        self._shared.close()
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
        RequestOutput with `error` set; the others are not affected. Threads share batches.
        """
        prompts = as_prompts(prompts)
        params = one_a_prompt(sampling_params, len(prompts))
        batch = GenerationBatch(self.tokenizer)
        with self._shared.inbox() as inbox:
            for prompt, one in zip(prompts, params, strict=True):
                batch.submit(inbox, self._next_request_id(), prompt, one)
            batch.run(inbox, use_tqdm)
        return batch.outputs()

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

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Complete one prompt, giving the text as it comes. Closing the iterator ends the request.

        Several streams may be open at once, in any threads, and generate() may run between their
        deltas.

        Raises InvalidRequestError for a prompt that can't run, GenerationError (from the iterator)
        when the engine fails.
        """
        deltas = self._deltas(*self._to_stream(prompt, sampling_params))
        # A generator that was never started would not run its `finally` when it is closed.
        next(deltas)
        return deltas

    def _deltas(self, request: Request, text: TextStream) -> Iterator[TextDelta]:
        """Submit, then give an empty delta; after it those of the text."""
        with self._shared.inbox() as inbox:
            inbox.submit(request)
            yield TextDelta()
            while not text.finished:
                yield from _deltas_of(inbox.receive(), text)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[TextDelta]:
        """As stream, for asyncio: `async for delta in llm.astream(prompt)`.

        The streams of all tasks run in the same batches. A task that is cancelled, or leaves the
        loop and closes the iterator, ends its request.
        """
        request, text = self._to_stream(prompt, sampling_params)
        with self._shared.inbox() as inbox:
            # The engine may be in the middle of a step.
            await asyncio.to_thread(inbox.submit, request)
            while not text.finished:
                for delta in _deltas_of(await inbox.receive_async(), text):
                    yield delta

    def _to_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None
    ) -> tuple[Request, TextStream]:
        (params,) = one_a_prompt(sampling_params, 1)
        for name, alone in (("n", 1), ("prompt_logprobs", None)):
            if getattr(params, name) != alone:
                raise InvalidRequestError(f"a stream takes no {name}; generate() does", param=name)
        ids = tuple(prompt_ids(prompt, self.tokenizer))
        request = Request(self._next_request_id(), ids, params)
        return request, TextStream(self.tokenizer, params)

    def stats(self) -> EngineStats:
        """What the engine has done so far and has to do."""
        _ = self.loaded
        return self._shared.stats()

    def _next_request_id(self) -> str:
        return f"request-{next(self._request_numbers)}"


def _deltas_of(outputs: list[TokenOutput], text: TextStream) -> Iterator[TextDelta]:
    if not outputs:
        raise GenerationError("the engine lost this request")
    for output in outputs:
        if output.finish_reason == "error":
            raise GenerationError(output.error)
        yield text.push(output)
