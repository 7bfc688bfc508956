"""What a request asks for, through the whole engine: against the plain model, one id at a time."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.engines import (
    Outputs,
    ids_of,
    log_softmax,
    request,
    run,
    small_reference,
    small_reopened,
)
from tests.support.mixed_requests import VOCABULARY_SIZE, random_prompt, run_arriving
from tests.support.sampling import Row, processed

# Float32 sums in another order; measured at most 4e-4 on logits of size 10.
TOLERANCE = 1e-3
PROMPT = random_prompt(random.Random(1), 50)


def logprobs_of(outputs: Outputs, name: str) -> list[tuple[float, dict[int, float]]]:
    """(the chosen token's, the likeliest ones' by id) at each generated position."""
    return [
        (entry.token, dict(entry.top))
        for output in outputs[name]
        for entry in output.logprobs or ()
    ]


@pytest.mark.parametrize(
    "options", [{}, {"logit_bias": {11: 100.0}}, {"presence_penalty": 2.0, "top_k": 3}], ids=str
)
def test_logprobs_are_the_raw_models_at_every_temperature(options: dict[str, Any]):
    asked = {"max_tokens": 12, "logprobs": 20, "seed": 3} | options
    temperatures = {"cold": 0.0, "cool": 0.3, "warm": 1.0}
    requests = [
        request(name, PROMPT, temperature=temperature, **asked)
        for name, temperature in temperatures.items()
    ]
    outputs = run(small_reopened(), *requests)
    for name in temperatures:
        ids = ids_of(outputs[name])
        # A bias of 100 gives every temperature the same ids.
        assert "logit_bias" not in options or ids == [11] * 12
        expected = log_softmax(small_reference()([*PROMPT, *ids[:-1]])[len(PROMPT) - 1 :])
        for place, (chosen, top) in enumerate(logprobs_of(outputs, name)):
            assert chosen == pytest.approx(expected[place, ids[place]], abs=TOLERANCE)
            best = np.argsort(-expected[place, :VOCABULARY_SIZE])[:20]
            assert set(top) == set(best.tolist())
            np.testing.assert_allclose(list(top.values()), expected[place, best], atol=TOLERANCE)


PENALTIES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 1.1},
}


def assert_penalised(ids: list[int], options: dict[str, float]) -> None:
    """Each id is the likeliest after the penalties that its predecessors make."""
    logits = small_reference()([*PROMPT, *ids[:-1]])[len(PROMPT) - 1 :, :VOCABULARY_SIZE]
    named: dict[str, Any] = {
        name.removesuffix("_penalty"): value for name, value in options.items()
    }
    row = Row(**named, prompt=PROMPT)
    for place, token_id in enumerate(ids):
        scores = processed(logits[place], replace(row, generated=tuple(ids[:place])))
        assert scores[token_id] >= scores.max() - TOLERANCE


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
def test_penalties_count_generated_tokens_and_repetition_the_prompts_too(
    options: dict[str, float],
):
    ids = ids_of(run(small_reopened(), request("r", PROMPT, max_tokens=40, **options))["r"])
    assert_penalised(ids, options)
    plain = ids_of(run(small_reopened(), request("r", PROMPT, max_tokens=40))["r"])
    assert ids != plain


def test_penalties_survive_preemption_and_other_rows():
    requests = [
        request(name, PROMPT, max_tokens=60, **options) for name, options in PENALTIES.items()
    ]
    # Others come and go before them, so that their rows change.
    others = [request(f"o{count}", PROMPT[:20], max_tokens=count) for count in (3, 9, 17, 25)]
    # Pages for one and a half of them at their ends.
    engine = small_reopened(num_pages=12)
    mixed = [one for pair in zip(others, requests, strict=True) for one in pair]
    outputs = run_arriving(engine, mixed, random.Random(5))
    assert engine.scheduler.num_preemptions >= 2
    for name, options in PENALTIES.items():
        ids = ids_of(outputs[name])
        assert len(ids) == 60
        assert_penalised(ids, options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_an_early_end(temperature: float):
    # Without min_tokens the first token would be the stop id.
    options: dict[str, Any] = {
        "temperature": temperature,
        "logit_bias": {7: 100.0},
        "stop_token_ids": [7],
    }
    options |= {"max_tokens": 100, "seed": 1}
    short = run(small_reopened(), request("r", PROMPT, **options))["r"]
    assert ids_of(short) == [7]
    outputs = run(small_reopened(), request("r", PROMPT, min_tokens=32, **options))["r"]
    ids = ids_of(outputs)
    assert len(ids) == 33 and 7 not in ids[:32]
    assert (ids[32], outputs[-1].finish_reason, outputs[-1].stop_reason) == (7, "stop", 7)


def test_min_tokens_holds_back_the_checkpoints_own_ends():
    ends = small_reopened().stop_token_ids
    biases = {token_id: 100.0 for token_id in ends}
    asked = request("r", PROMPT, logit_bias=biases, max_tokens=40, ignore_eos=False, min_tokens=32)
    outputs = run(small_reopened(), asked)["r"]
    ids = ids_of(outputs)
    assert len(ids) == 33 and not ends & set(ids[:32]) and ids[32] in ends
