"""The prompts that LLM's methods are given, in the many shapes that people have them in."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def as_prompts(prompts: object) -> list[Any]:
    """One prompt or a list of them -> a list. A flat list of ints is one prompt of ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not is_list(prompts):
        raise InvalidRequestError(
            f"prompts must be text, token ids or a list of those, not {type(prompts).__name__}",
            param="prompts",
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def prompt_ids(prompt: object, tokenizer: Tokenizer) -> list[int]:
    """A prompt's token ids. Raises InvalidRequestError for what is no prompt."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f"a prompt is text or a list of token ids, not a mapping with "
            f"{', '.join(map(str, prompt))}: attention masks and padding are not taken; "
            "pass each sequence's own ids",
            param="prompt",
        )
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # pyright: ignore[reportAttributeAccessIssue]  (an array)
    if not is_list(prompt) or not all(
        isinstance(token_id, Integral) and not isinstance(token_id, bool) for token_id in prompt
    ):
        raise InvalidRequestError(
            f"a prompt is text or a list of token ids, not {prompt!r:.80}", param="prompt"
        )
    return [int(token_id) for token_id in prompt]


def one_a_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> list[SamplingParams]:
    """The sampling params of each of so many prompts: one for all, or a list with each one's."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * prompts
    if not is_list(sampling_params) or not all(
        isinstance(one, SamplingParams) for one in sampling_params
    ):
        raise InvalidRequestError(
            "sampling_params must be a SamplingParams, or a list with one for each prompt, not "
            f"{sampling_params!r:.80}",
            param="sampling_params",
        )
    if len(sampling_params) != prompts:
        raise InvalidRequestError(
            f"sampling_params has {len(sampling_params)} entries for {prompts} prompts",
            param="sampling_params",
        )
    return list(sampling_params)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    # bytes are a sequence of integers too, but hardly meant as token ids.
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
