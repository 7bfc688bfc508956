"""Ten questions to the default model over HTTP, which a sabotaged model can't answer."""

from collections.abc import Callable
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import pytest

from bench.tiny_model.dataset import render_prompt
from bench.tiny_model.doors import serving
from bench.tiny_model.example import Example
from bench.tiny_model.tasks import check
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.config import EngineConfig
from qwen35_jax.loading import load_engine
from qwen35_jax.model.delta_rule import recurrent_delta_rule
from qwen35_jax.model.layers import apply_rope, rms

Patch = pytest.MonkeyPatch

# Over the longest right answer.
MAX_TOKENS = 96
ANSWER_SECONDS = 120
# Without positions the model still knows facts; what hangs on order it can't say.
MOST_RIGHT_WHEN_SABOTAGED = 6

EXCHANGE = {
    "type": "function",
    "function": {
        "name": "convert",
        "description": "Exchange one currency into another",
        "parameters": {
            "type": "object",
            "properties": {
                "amount": {"type": "number"},
                "from": {"type": "string"},
                "to": {"type": "string"},
            },
            "required": ["amount", "from", "to"],
        },
    },
}


def question(
    skill: str,
    text: str,
    answer: dict[str, Any],
    *,
    thinking: bool,
    tools: list[dict[str, Any]] | None = None,
) -> Example:
    return Example(
        skill=skill,
        messages=[{"role": "user", "content": text}],
        tools=tools or [],
        enable_thinking=thinking,
        target="",
        answer=answer,
    )


QUESTIONS = (
    question(
        "capital",
        "Name the capital of Argentina.",
        {"kind": "capital", "subject": "Argentina", "value": "Buenos Aires"},
        thinking=False,
    ),
    question(
        "currency",
        "How do I pay in Oman: in which currency?",
        {"kind": "currency", "subject": "Oman", "country": "OM"},
        thinking=True,
    ),
    question(
        "sum",
        "What's the sum of 78 and 59?",
        {"kind": "number", "value": 137},
        thinking=True,
    ),
    question(
        "difference",
        "How much is 51 - 14?",
        {"kind": "number", "value": 37},
        thinking=True,
    ),
    question(
        "sort_numbers",
        "Order these numbers from low to high: 21, 15, 9",
        {"kind": "items", "value": ["9", "15", "21"]},
        thinking=False,
    ),
    question(
        "reverse_list",
        "Please reverse: hat, chalk, raven, brother, library",
        {"kind": "items", "value": ["library", "brother", "raven", "chalk", "hat"]},
        thinking=True,
    ),
    question(
        "count_letter",
        "How many of the letters of carrot are r?",
        {"kind": "number", "value": 2},
        thinking=False,
    ),
    question(
        "json_record",
        "Extract age and city as JSON: In Vilnius lives Omar, who is 56.",
        {"kind": "json", "value": {"age": 56, "city": "Vilnius"}},
        thinking=False,
    ),
    question(
        "tool_call",
        "Please convert 242 GTQ into SLE.",
        {
            "kind": "tool_call",
            "name": "convert",
            "arguments": {"amount": 242, "from": "GTQ", "to": "SLE"},
        },
        thinking=True,
        tools=[EXCHANGE],
    ),
    question(
        "convert_units",
        "What is 239 degrees Fahrenheit in °C?",
        {"kind": "quantity", "value": 115, "unit": "°C"},
        thinking=True,
    ),
)


def _without_recurrent_state(patch: Patch) -> None:
    """Every decode step starts from zeros; prompts, which run in chunks, don't."""

    def forgetful(
        q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return recurrent_delta_rule(q, k, v, g, beta, jnp.zeros_like(state))

    patch.setattr("qwen35_jax.model.paged.recurrent_delta_rule", forgetful)


def _without_rope(patch: Patch) -> None:
    def unturned(x: jax.Array, *_: jax.Array, round_products_to: str) -> jax.Array:
        return x

    patch.setattr("qwen35_jax.model.attention.apply_rope", unturned)


def _with_doubled_angles(patch: Patch) -> None:
    def turned_twice(x: jax.Array, *tables: jax.Array, **options: str) -> jax.Array:
        return apply_rope(apply_rope(x, *tables, **options), *tables, **options)

    patch.setattr("qwen35_jax.model.attention.apply_rope", turned_twice)


def _with_norms_by_the_weight_alone(patch: Patch) -> None:
    def norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
        return rms(x.astype(jnp.float32), epsilon) * weight.astype(jnp.float32)

    patch.setattr("qwen35_jax.model.layers.rms_norm_float32", norm)
    patch.setattr("qwen35_jax.model.attention.rms_norm_float32", norm)


def wrong_answers() -> dict[str, str]:
    """The texts that don't answer their question, by skill, of a server with the default model.

    It is loaded anew: its programs are made of the functions as they now are.
    """
    template = ChatTemplate.built_in()
    wrong = {}
    loaded = load_engine(EngineConfig(max_num_seqs=1))
    with serving(loaded) as url, httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as http:
        for example in QUESTIONS:
            body = {
                "prompt": render_prompt(example, template),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            response = http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            if choice["finish_reason"] != "stop" or not check(example, choice["text"]):
                wrong[example["skill"]] = choice["text"]
    return wrong


def test_ten_questions_of_ten_skills_are_answered_rightly():
    assert wrong_answers() == {}


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(_without_recurrent_state, id="recurrent_state_not_carried"),
        pytest.param(_without_rope, id="no_rope"),
        pytest.param(_with_doubled_angles, id="doubled_angles"),
        pytest.param(_with_norms_by_the_weight_alone, id="norms_by_the_weight_alone"),
    ],
)
def test_a_sabotaged_model_fails_the_same_questions(
    sabotage: Callable[[Patch], None], monkeypatch: Patch
):
    sabotage(monkeypatch)
    wrong = wrong_answers()
    assert len(QUESTIONS) - len(wrong) <= MOST_RIGHT_WHEN_SABOTAGED, sorted(wrong)
