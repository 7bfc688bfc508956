"""What LLM.generate does with its prompts: choices of each go to the engine, results come back."""

from dataclasses import dataclass, field

from tqdm import tqdm

from qwen35_jax.engine.request import Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.shared import Inbox
from qwen35_jax.engine.text_stream import TextDelta, TextStream
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.outputs import CompletionOutput, RequestOutput
from qwen35_jax.prompts import prompt_ids
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer


class GenerationBatch:
    """Prompts on their way to RequestOutputs, in the order in which they were submitted."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._prompts: list[_Prompt] = []
        self._running: dict[str, tuple[_Prompt, _Choice]] = {}

    def submit(self, inbox: Inbox, request_id: str, prompt: object, params: SamplingParams) -> None:
        """Submit all choices of one prompt. One that can't run gets its error, and none runs."""
        one = _Prompt(request_id, prompt if isinstance(prompt, str) else None)
        self._prompts.append(one)
        submitted: list[str] = []
        try:
            one.token_ids = prompt_ids(prompt, self._tokenizer)
            for index in range(params.n):
                choice_params = params.of_choice(index)
                choice_id = request_id if params.n == 1 else f"{request_id}-{index}"
                inbox.submit(Request(choice_id, tuple(one.token_ids), choice_params))
                choice = _Choice(index, choice_params, TextStream(self._tokenizer, choice_params))
                one.choices.append(choice)
                self._running[choice_id] = one, choice
                submitted.append(choice_id)
        except InvalidRequestError as error:
            one.error = str(error)
            for choice_id in submitted:
                self._drop(inbox, choice_id)

    def run(self, inbox: Inbox, use_tqdm: bool) -> None:
        """Wait until every request has ended."""
        prompts = sum(one.error is None for one in self._prompts)
        with tqdm(total=prompts, desc="Generating", disable=not use_tqdm) as bar:
            while self._running and (outputs := inbox.receive()):
                for output in outputs:
                    self._take(output, inbox, bar)
        for one, _ in self._running.values():
            one.error = "the engine lost this request"

    def _take(self, output: TokenOutput, inbox: Inbox, bar: tqdm) -> None:
        request_id = output.request_id
        if request_id not in self._running:  # its last tokens came after a stop string
            return
        one, choice = self._running[request_id]
        choice.push(output)
        if output.prompt_logprobs is not None:
            one.prompt_logprobs = list(output.prompt_logprobs)
        if output.error is not None:
            one.error = output.error
        if choice.last is None:
            return
        if output.finish_reason is None:  # a stop string, which only the text shows
            inbox.abort(request_id)
        del self._running[request_id]
        bar.update(all(choice.last is not None for choice in one.choices))

    def _drop(self, inbox: Inbox, request_id: str) -> None:
        inbox.abort(request_id)
        del self._running[request_id]

    def outputs(self) -> list[RequestOutput]:
        return [one.output() for one in self._prompts]


@dataclass
class _Choice:
    """One of a prompt's sequences. last: the delta that ended it."""

    index: int
    params: SamplingParams
    text: TextStream
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: TextDelta | None = None

    def push(self, output: TokenOutput) -> None:
        delta = self.text.push(output)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.last = delta

    def output(self) -> CompletionOutput:
        assert self.last is not None and self.last.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=self.text.token_ids,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            logprobs=None if self.params.logprobs is None else self.logprobs,
        )


@dataclass
class _Prompt:
    request_id: str
    text: str | None
    token_ids: list[int] = field(default_factory=list)
    choices: list[_Choice] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None

    def output(self) -> RequestOutput:
        outputs = [] if self.error is not None else [choice.output() for choice in self.choices]
        return RequestOutput(
            self.request_id,
            self.text,
            self.token_ids,
            outputs,
            self.error,
            None if self.error is not None else self.prompt_logprobs,
        )
