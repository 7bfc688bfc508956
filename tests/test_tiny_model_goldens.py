"""The default model in this engine says what it says in transformers, token for token."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qwen35_jax.default_model import default_model_directory
from qwen35_jax.llm import LLM
from qwen35_jax.outputs import CompletionOutput
from qwen35_jax.sampling_params import SamplingParams
from tests.golden.make_tiny_model_goldens import GREEDY, MAX_NEW_TOKENS, model_sha256

# Four full batches, so that all of them run the same two programs.
BATCH_ROWS = 25
PIECE = 64
# Measured: 3e-5 on logits of about 10.
GAP_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Goldens:
    """conversations: what the template takes. The others are what transformers makes of it.

    gaps: of the two best logits at every token of all answers, one answer after another.
    """

    conversations: list[dict[str, Any]]
    prompts: list[str]
    prompt_ids: list[list[int]]
    answer_ids: list[list[int]]
    gaps: np.ndarray
    model_sha256: str


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    with np.load(GREEDY) as arrays:
        return Goldens(
            conversations=json.loads(str(arrays["conversations"])),
            prompts=json.loads(str(arrays["prompts"])),
            prompt_ids=split(arrays["prompt_ids"], arrays["prompt_lengths"]),
            answer_ids=split(arrays["answer_ids"], arrays["answer_lengths"]),
            gaps=arrays["answer_gaps"],
            model_sha256=str(arrays["model_sha256"]),
        )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_num_seqs=BATCH_ROWS) as opened:
        yield opened


@pytest.fixture(scope="module")
def outputs(goldens: Goldens, llm: LLM) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, logprobs=2)
    results = llm.generate(goldens.prompt_ids, params, use_tqdm=False)
    return [result.outputs[0] for result in results]


def split(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths.astype(int))[:-1])]


def test_the_goldens_are_of_the_model_that_is_here(goldens: Goldens):
    assert goldens.model_sha256 == model_sha256(default_model_directory()), (
        "the default model has changed: run tests/golden/make_tiny_model_goldens.py again"
    )


def test_a_hundred_conversations_render_as_in_transformers(goldens: Goldens, llm: LLM):
    rendered = [
        llm.chat_template.render(
            conversation["messages"],
            tools=conversation["tools"] or None,
            enable_thinking=conversation["enable_thinking"],
        )
        for conversation in goldens.conversations
    ]
    assert rendered == goldens.prompts
    assert len(rendered) == 100


def test_a_hundred_prompts_have_the_ids_of_transformers(goldens: Goldens, llm: LLM):
    assert [llm.tokenizer.encode(prompt) for prompt in goldens.prompts] == goldens.prompt_ids


def test_a_hundred_greedy_answers_are_those_of_transformers(
    goldens: Goldens, outputs: list[CompletionOutput]
):
    assert [list(output.token_ids) for output in outputs] == goldens.answer_ids


def test_the_second_best_token_is_as_far_behind_as_in_transformers(
    goldens: Goldens, outputs: list[CompletionOutput]
):
    tops = [one.top for output in outputs for one in output.logprobs or ()]
    gaps = np.array([best - second for (_, best), (_, second) in tops])
    np.testing.assert_allclose(gaps, goldens.gaps, rtol=0, atol=GAP_TOLERANCE)
