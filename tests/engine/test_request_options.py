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
from tests.support.mixed_requests import VOCABULARY_SIZE, preempt, random_prompt
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


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
def test_penalties_survive_preemption_and_other_rows(options: dict[str, float]):
    engine = small_reopened()
    # Those before it end one after the other, so that its row changes.
    for count in (3, 30, 47):
        engine.submit(request(f"before{count}", PROMPT[:20], max_tokens=count))
    engine.submit(request("r", PROMPT, max_tokens=60, **options))
    ids: list[int] = []
    while engine.has_work():
        ids += [
            token_id
            for output in engine.step()
            if output.request_id == "r"
            for token_id in output.token_ids
        ]
        live = engine._live.get("r")
        if live is not None and live.sequence.num_sampled in (20, 40):
            preempt(engine, "r")
    assert engine.scheduler.num_preemptions == 2
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


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, True), (True, False)])
def test_stop_ids_of_a_request_are_beside_the_checkpoints_own(ignore_eos: bool, ends: bool):
    own = min(small_reopened().stop_token_ids)
    options: dict[str, Any] = {"stop_token_ids": [7], "max_tokens": 5, "ignore_eos": ignore_eos}
    for token_id, wanted in ((own, ends), (7, True)):
        asked = request("r", PROMPT, logit_bias={token_id: 100.0}, **options)
        outputs = run(small_reopened(), asked)["r"]
        assert len(ids_of(outputs)) == (1 if wanted else 5)
        assert outputs[-1].stop_reason == (token_id if wanted else None)
