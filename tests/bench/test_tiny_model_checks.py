"""The checkers accept an answer in any words, and nothing but the answer."""

from typing import Any

import pytest

from bench.tiny_model.checks import check
from bench.tiny_model.example import Example
from bench.tiny_model.tool_tasks import call_text

CAPITAL = {"kind": "capital", "subject": "Norway", "value": "Oslo", "country": "NO"}
SAME_NAME = {"kind": "capital", "subject": "Djibouti", "value": "Djibouti", "country": "DJ"}
LONGER = {"kind": "capital", "subject": "Mexico", "value": "Mexico City", "country": "MX"}
COUNTRY = {
    "kind": "country_of_capital",
    "subject": "Amsterdam",
    "value": "the Netherlands",
    "country": "NL",
}
CURRENCY = {"kind": "currency", "subject": "Japan", "value": "Japanese yen (JPY)", "country": "JP"}
CONTINENT = {"kind": "continent", "subject": "South Africa", "value": "Africa", "country": "ZA"}
ITEMS = {"kind": "items", "value": ["3", "12", "40"]}
LETTERS = {"kind": "letters", "value": "elppa"}
NUMBER = {"kind": "number", "value": -22}
QUANTITY = {"kind": "quantity", "value": 7000, "unit": "m"}
JSON = {"kind": "json", "value": {"name": "Anna", "age": 34}}
MENTIONS = {"kind": "mentions", "value": ["-5", "rain"]}
CALL = {"kind": "tool_call", "name": "convert", "arguments": {"amount": 5, "to": "EUR"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "convert",
            "parameters": {"properties": {"amount": {"type": "number"}, "to": {"type": "string"}}},
        },
    }
]


def example(answer: dict[str, Any], *, enable_thinking: bool = False) -> Example:
    return Example(
        skill="any",
        messages=[],
        tools=TOOLS,
        enable_thinking=enable_thinking,
        target="",
        answer=answer,
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (CAPITAL, "Oslo"),
        (CAPITAL, "It is oslo, of course!"),
        (SAME_NAME, "Djibouti."),
        (SAME_NAME, "The capital of Djibouti is Djibouti."),
        (LONGER, "Mexico City is the capital of Mexico."),
        (COUNTRY, "Netherlands"),
        (COUNTRY, "That is the Netherlands; Amsterdam is its capital."),
        (CURRENCY, "JPY"),
        (CURRENCY, "People in Japan pay in Japanese yen."),
        (CONTINENT, "South Africa is in Africa."),
        (ITEMS, "Sorted: 3, 12, 40"),
        (ITEMS, "take 12: 12\n\n3, 12, 40."),
        (LETTERS, "Backwards it is ELPPA."),
        (NUMBER, "23 - 45 = -22."),
        (NUMBER, "-22"),
        (QUANTITY, "7 km = 7000 m."),
        (QUANTITY, "That is 7000 m"),
        (JSON, '{"age": 34, "name": "Anna"}'),
        (JSON, '{\n  "name": "Anna",\n  "age": 34\n}'),
        (MENTIONS, "There is Rain at -5 °C."),
        (CALL, call_text("convert", {"amount": 5, "to": "EUR"})),
        (CALL, "One moment.\n\n" + call_text("convert", {"to": "EUR", "amount": 5.0})),
    ],
)
def test_a_right_answer_in_other_words_is_right(answer: dict[str, Any], text: str):
    assert check(example(answer), text)
    assert check(example(answer, enable_thinking=True), f"Hm, Paris? 5?\n</think>\n\n{text}")
    assert not check(example(answer, enable_thinking=True), text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (CAPITAL, "Bergen"),
        (CAPITAL, "Oslo or Paris"),
        (CAPITAL, "Oslofjord"),
        (CAPITAL, "The capital of Norway"),
        (SAME_NAME, "The capital of Djibouti is Oslo."),
        (SAME_NAME, "The capital of Djibouti is unknown."),
        (LONGER, "The capital of Mexico is Mexico."),
        (COUNTRY, "Amsterdam is the capital of Norway."),
        (COUNTRY, "Amsterdam is the capital of Amsterdam."),
        (CURRENCY, "The currency of Japan is the euro (EUR)."),
        (CURRENCY, "The currency of Japan is the Japanese yen (USD)."),
        (CURRENCY, "The currency of Japan is the yen."),
        (CONTINENT, "South Africa is in Asia."),
        (CONTINENT, "South Africa."),
        (ITEMS, "Sorted: 3, 40, 12"),
        (ITEMS, "Sorted: 3, 12"),
        (ITEMS, "Sorted: 3, 12, 40, 40"),
        (LETTERS, "Backwards it is ELPA."),
        (NUMBER, "23 - 45 = 22."),
        (NUMBER, "23 - 45"),
        (QUANTITY, "7 km = 7000 km."),
        (QUANTITY, "7 km = 7000 min."),
        (QUANTITY, "7 km = 700 m."),
        (JSON, '{"name": "Anna", "age": "34"}'),
        (JSON, '{"name": "Anna"}'),
        (JSON, '{"name": "Anna", "age": 34, "city": "Oslo"}'),
        (JSON, 'Here it is: {"name": "Anna", "age": 34}'),
        (MENTIONS, "There is rain at 5 °C."),
        (MENTIONS, "There is rainbow at -5 °C."),
        (MENTIONS, "There is rain at -5.5 °C."),
        (CALL, call_text("convert", {"amount": 6, "to": "EUR"})),
        (CALL, call_text("convert", {"amount": 5, "to": "USD"})),
        (CALL, call_text("convert", {"amount": 5})),
        (CALL, call_text("convert", {"amount": 5, "to": "EUR", "when": "now"})),
        (CALL, call_text("convert", {"amount": "five", "to": "EUR"})),
        (CALL, call_text("search", {"amount": 5, "to": "EUR"})),
        (CALL, call_text("convert", {"amount": 5, "to": "EUR"}).replace("</tool_call>", "")),
        (CALL, call_text("convert", {"amount": 5, "to": "EUR"}) * 2),
    ],
)
def test_a_wrong_answer_is_wrong(answer: dict[str, Any], text: str):
    assert not check(example(answer), text)
    assert not check(example(answer, enable_thinking=True), f"Hm.\n</think>\n\n{text}")


def test_the_thoughts_dont_count():
    thinking = example(CAPITAL, enable_thinking=True)
    assert not check(thinking, "Oslo\n</think>\n\nI don't know.")
    assert check(thinking, "Paris?\n</think>\n\nOslo")


def test_what_follows_the_end_of_the_turn_doesnt_count():
    assert check(example(CAPITAL), "Oslo<|im_end|>\n<|im_start|>Paris")
