"""Whether a generated text answers its question: by what it says, not by how it says it."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from bench.tiny_model.example import Example
from bench.tiny_model.facts import ARTICLE, countries, currency_names

END_OF_TURN = "<|im_end|>"
_NUMBER = r"(?:(?<![\w.)])-)?\d+(?:\.\d+)?"
_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def check(example: Example, generated_text: str) -> bool:
    """Whether the text after the generation prompt holds the example's answer.

    generated_text: with or without the <|im_end|> that ended it. The thoughts don't count; a text
    that never leaves its think block is wrong, and so is a tool call where none is due.
    """
    text = generated_text.split(END_OF_TURN)[0]
    answer = example["answer"]
    content = _content(text, enable_thinking=example["enable_thinking"])
    if answer["kind"] == "tool_call":
        return _tool_call_is_right(content, answer, example["tools"])
    if not content or "<tool_call>" in content:
        return False
    return CHECKERS[answer["kind"]](content, answer)


def _content(text: str, *, enable_thinking: bool) -> str:
    if not enable_thinking and "</think>" not in text:
        return text.strip()
    return text.partition("</think>")[2].strip()


def _tool_call_is_right(content: str, answer: dict[str, Any], tools: list[dict[str, Any]]) -> bool:
    calls = _CALL.findall(content)
    if len(calls) != 1 or content.count("<tool_call>") != 1 or calls[0][0] != answer["name"]:
        return False
    given = dict(_PARAMETER.findall(calls[0][1]))
    definitions = {tool["function"]["name"]: tool["function"] for tool in tools}
    properties = definitions[answer["name"]]["parameters"]["properties"]
    if given.keys() != answer["arguments"].keys():
        return False
    return all(
        _argument_equals(given[name], wanted, properties[name]["type"])
        for name, wanted in answer["arguments"].items()
    )


def _argument_equals(given: str, wanted: Any, json_type: str) -> bool:
    if json_type == "number":
        return re.fullmatch(_NUMBER, given) is not None and float(given) == float(wanted)
    return "".join(given.split()).lower() == "".join(str(wanted).split()).lower()


def _number_is_right(content: str, answer: dict[str, Any]) -> bool:
    numbers = re.findall(_NUMBER, content)
    return bool(numbers) and float(numbers[-1]) == answer["value"]


def _quantity_is_right(content: str, answer: dict[str, Any]) -> bool:
    last_line = content.splitlines()[-1]
    found = re.findall(rf"({_NUMBER})\s*{re.escape(answer['unit'])}(?!\w)", last_line)
    return bool(found) and float(found[-1]) == answer["value"]


def _items_are_right(content: str, answer: dict[str, Any]) -> bool:
    listed = content.splitlines()[-1].rpartition(":")[2]
    items = [item.strip(" .\"'[]") for item in listed.split(",")]
    return items == answer["value"]


def _letters_are_right(content: str, answer: dict[str, Any]) -> bool:
    words = re.findall(r"[A-Za-z]+", content.splitlines()[-1])
    return bool(words) and words[-1].lower() == answer["value"]


def _json_is_right(content: str, answer: dict[str, Any]) -> bool:
    try:
        return _same(json.loads(content), answer["value"])
    except ValueError:
        return False


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _mentions_are_there(content: str, answer: dict[str, Any]) -> bool:
    return all(
        re.search(rf"(?<![\w.-]){re.escape(wanted)}(?![\w]|\.\d)", content, re.IGNORECASE)
        for wanted in answer["value"]
    )


@cache
def _values(kind: str) -> frozenset[str]:
    """Every answer that this kind of question may have, in lower case and without the article."""
    fields: dict[str, Callable[[Any], str | None]] = {
        "capital": lambda country: country.capital,
        "country_of_capital": lambda country: country.name,
        "language": lambda country: country.language,
        "continent": lambda country: country.continent,
    }
    found = map(fields[kind], countries())
    return frozenset(value.lower() for value in found if value is not None)


@cache
def _pattern(values: frozenset[str]) -> re.Pattern[str]:
    # The longest first: "Guinea-Bissau" isn't "Guinea", nor is "South Africa" "Africa".
    longest_first = sorted(values, key=lambda value: (-len(value), value))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


def _fact_is_right(content: str, answer: dict[str, Any]) -> bool:
    """The right value is named, and no other value of its kind is."""
    subject, value = (answer[key].lower().removeprefix(ARTICLE) for key in ("subject", "value"))
    pattern = _pattern(_values(answer["kind"]) | {subject})
    found = pattern.findall(content.lower())
    if subject == value:
        # "The capital of Djibouti is ..." alone says nothing.
        return set(found) == {value} and (len(found) > 1 or content.lower().strip(" .") == value)
    return set(found) - {subject} == {value}


def _currency_is_right(content: str, answer: dict[str, Any]) -> bool:
    """Name or code is there, and neither of another currency."""
    code = next(
        country.currency_code for country in countries() if country.code == answer["country"]
    )
    names = currency_names()
    codes = set(re.findall(r"(?<!\w)[A-Z]{3}(?!\w)", content)) & names.keys()
    by_name = {name.lower(): of for of, name in names.items()}
    subject = answer["subject"].lower().removeprefix(ARTICLE)
    named = _pattern(frozenset({*by_name, subject})).findall(content.lower())
    return codes | _codes_of(named, by_name) == {code}


def _codes_of(names: Iterable[str], by_name: dict[str, str]) -> set[str]:
    return {by_name[name] for name in names if name in by_name}


CHECKERS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "capital": _fact_is_right,
    "country_of_capital": _fact_is_right,
    "language": _fact_is_right,
    "continent": _fact_is_right,
    "currency": _currency_is_right,
    "number": _number_is_right,
    "quantity": _quantity_is_right,
    "items": _items_are_right,
    "letters": _letters_are_right,
    "json": _json_is_right,
    "mentions": _mentions_are_there,
}
