"""Greedy tokens judged by `forward`: the model's own pass, others are found out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench import regret
from bench.regret import compare_rows, measure_regret
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.llm import LLM
from qwen35_jax.model.transformer import forward
from tests.support.engines import default_llm, fast_compilation


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(regret, "NEW_TOKENS", 6)
    return default_llm()


class Fake(FakeEngine):
    in_flight = None


def options(llm: LLM, **more: Any) -> dict[str, Any]:
    sizes = {"vocabulary_size": llm.tokenizer.vocabulary_size, "max_model_len": 400}
    return sizes | more


def test_the_models_own_tokens_pass_and_others_do_not(llm: LLM):
    right = measure_regret(llm.loaded.engine, llm.params, most=0.1, **options(llm))
    assert right["passed"] is True
    # 700 tokens are more than the context.
    assert [*right["by_prompt_tokens"]] == ["5", "127"]
    assert right["tokens"] == 12
    assert right["max"] <= 0.1
    wrong = measure_regret(Fake(**options(llm)), llm.params, most=0.1, **options(llm))
    assert wrong["passed"] is False
    assert wrong["by_prompt_tokens"]["5"]["max"] > 1
    assert wrong["by_prompt_tokens"]["5"]["same"] < 1


def test_a_regret_is_the_distance_from_the_largest_logit_of_the_whole_row(llm: LLM):
    fake = Fake(**options(llm), script=lambda prompt: [7, 8, 9, 10, 11, 12])
    found = measure_regret(fake, llm.params, most=0.1, prompts=(3,), **options(llm))
    prompt = np.random.default_rng(0).integers(0, llm.tokenizer.vocabulary_size, 3)
    ids = jnp.asarray([[*prompt, 7, 8, 9, 10, 11, 12]], jnp.int32)
    logits = np.asarray(forward(llm.params, ids))[0, 2:-1, : llm.tokenizer.vocabulary_size]
    regrets = logits.max(-1) - logits[np.arange(6), np.arange(7, 13)]
    assert found["max"] == pytest.approx(regrets.max(), abs=0.1)
    assert found["mean"] == pytest.approx(regrets.mean(), abs=0.1)


def test_ids_that_may_not_be_chosen_do_not_count(llm: LLM):
    """With a vocabulary of one id, that id is the best there is."""
    fake = Fake(vocabulary_size=1, max_model_len=400)
    sizes = options(llm, vocabulary_size=1)
    found = measure_regret(fake, llm.params, most=0.0, **sizes)
    assert (found["passed"], found["max"], found["same"]) == (True, 0.0, 1.0)


def test_answers_cut_short_and_logits_that_are_no_numbers_fail(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    class Short(Fake):
        def submit(self, request: Request) -> None:
            super().submit(replace(request, params=replace(request.params, max_tokens=4)))

    found = measure_regret(
        Short(**options(llm)), llm.params, most=1e9, prompts=(3,), **options(llm)
    )
    assert (found["passed"], found["tokens"]) == (False, 4)

    monkeypatch.setattr(regret, "_regrets", lambda *_, **__: np.full((1, 6), np.nan))
    found = measure_regret(Fake(**options(llm)), llm.params, most=1.0, prompts=(3,), **options(llm))
    assert (found["passed"], found["max"], found["mean"]) == (False, None, None)


def test_rows_of_one_prompt_are_compared(llm: LLM):
    sizes = options(llm)
    same = compare_rows(llm.loaded.engine, 3, **sizes)
    assert same == {"rows": 3, "prompt_tokens": 127, "tokens": 6, "rows_that_differ": 0}

    class Uneven(Fake):
        def step(self) -> list[Any]:
            outputs = super().step()
            for output in outputs:
                if output.request_id == "row-1":
                    object.__setattr__(output, "token_ids", (0,))
            return outputs

    uneven = Uneven(**sizes, script=lambda prompt: [1])
    assert compare_rows(uneven, 3, **sizes)["rows_that_differ"] == 1
