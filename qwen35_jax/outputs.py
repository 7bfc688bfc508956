"""What LLM.generate returns, with the names people know from vLLM."""

from dataclasses import dataclass, field

from qwen35_jax.engine.request import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    text: the generated text, without a stop string or stop token that ended it.
    token_ids: the generated ids, with the stop id that ended them, if one did.
    finish_reason: "stop", "length", or "abort" where the LLM was closed while it ran.
    stop_reason: the stop string or stop id that ended it, if one did.
    logprobs: one entry an id, when SamplingParams.logprobs asked for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt's result.

    outputs: one a choice, SamplingParams.n of them; empty where the request failed.
    error: why it failed. prompt_logprobs: one entry a prompt token, the first None, when they were
    asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
