"""Conversions of units between whole numbers."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.tiny_model.example import Draft, Split
from bench.tiny_model.number_tasks import COLUMNS
from bench.tiny_model.splits import operands_fit, phrasings_of

PHRASINGS = (
    "Convert {value} {source} to {target}.",
    "How many {target} is {value} {source}?",
    "How many {target} are in {value} {source}?",
    "What is {value} {source} in {target}?",
    "{value} {source} in {target}?",
    "{value} {source} to {target}",
    "Please convert {value} {source} into {target}.",
    "Express {value} {source} in {target}.",
    "How much is {value} {source} in {target}?",
    "Change {value} {source} to {target}.",
    "I have {value} {source}. What is that in {target}?",
    "Can you convert {value} {source} to {target}?",
)


@dataclass(frozen=True)
class Unit:
    """Its sign in replies, and the names that questions use, all plural."""

    sign: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """From one unit to another, over a range of values.

    few: there are so few values that they split by phrasing, as facts do.
    hard: without thinking, the reply shows the working.
    """

    source: Unit
    target: Unit
    values: range
    working: Callable[[int], tuple[str, int]]
    few: bool = False
    hard: bool = False


def hours_working(hours: int) -> tuple[str, int]:
    """Times 6, digit by digit, then a zero."""
    lines, written, carry = [f"1 h = 60 min, so {hours}*6, then a 0"], "", 0
    for place, digit in enumerate(reversed(str(hours))):
        total = int(digit) * 6 + carry
        lines.append(
            f"{COLUMNS[place]}: {digit}*6+{carry}={total}, write {total % 10}, carry {total // 10}"
        )
        carry, written = total // 10, f"{total % 10}{written}"
    if carry:
        lines.append(f"carry {carry} in front")
    return "\n".join([*lines, f"result: {hours * 60}"]), hours * 60


def minutes_working(minutes: int) -> tuple[str, int]:
    """Without the zero, then long division by 6."""
    lines, written, rest = [f"60 min = 1 h, so {minutes // 10}/6"], "", 0
    for digit in str(minutes // 10):
        part = rest * 10 + int(digit)
        lines.append(f"{part}/6={part // 6}, rest {part % 6}")
        rest, written = part % 6, f"{written}{part // 6}"
    return "\n".join([*lines, f"written: {written}", f"result: {minutes // 60}"]), minutes // 60


def times_1000(value: int) -> tuple[str, int]:
    return f"times 1000: three zeros more, {value * 1000}", value * 1000


def over_1000(value: int) -> tuple[str, int]:
    return f"over 1000: three zeros less, {value // 1000}", value // 1000


def celsius_working(celsius: int) -> tuple[str, int]:
    fifth = celsius // 5
    fahrenheit = fifth * 9 + 32
    return f"{celsius}/5={fifth}\n{fifth}*9={fifth * 9}\n{fifth * 9}+32={fahrenheit}", fahrenheit


def fahrenheit_working(fahrenheit: int) -> tuple[str, int]:
    ninth = (fahrenheit - 32) // 9
    return f"{fahrenheit}-32={ninth * 9}\n{ninth * 9}/9={ninth}\n{ninth}*5={ninth * 5}", ninth * 5


KILOMETRES = Unit("km", ("km", "kilometres", "kilometers"))
METRES = Unit("m", ("m", "metres", "meters"))
KILOGRAMS = Unit("kg", ("kg", "kilograms"))
GRAMS = Unit("g", ("g", "grams"))
HOURS = Unit("h", ("hours",))
MINUTES = Unit("min", ("minutes",))
CELSIUS = Unit("°C", ("°C", "degrees Celsius"))
FAHRENHEIT = Unit("°F", ("°F", "degrees Fahrenheit"))
SMALL, THOUSANDS = range(1, 500), range(1000, 500_000, 1000)
CONVERSIONS = (
    Conversion(KILOMETRES, METRES, SMALL, times_1000),
    Conversion(METRES, KILOMETRES, THOUSANDS, over_1000),
    Conversion(KILOGRAMS, GRAMS, SMALL, times_1000),
    Conversion(GRAMS, KILOGRAMS, THOUSANDS, over_1000),
    Conversion(HOURS, MINUTES, range(1, 100), hours_working, hard=True),
    Conversion(MINUTES, HOURS, range(60, 6000, 60), minutes_working, hard=True),
    Conversion(CELSIUS, FAHRENHEIT, range(-40, 155, 5), celsius_working, few=True, hard=True),
    Conversion(FAHRENHEIT, CELSIUS, range(-40, 303, 9), fahrenheit_working, few=True, hard=True),
)


def conversion_draft(split: Split, random_source: random.Random) -> Draft:
    """A conversion in one of eight directions."""
    conversion = random_source.choice(CONVERSIONS)
    key = (conversion.source.sign, conversion.target.sign)
    phrasings = PHRASINGS
    value = random_source.choice(conversion.values)
    if conversion.few:
        phrasings = phrasings_of(split, (*key, value), PHRASINGS)
    else:
        while not operands_fit(split, *key, value):
            value = random_source.choice(conversion.values)
    plan, result = conversion.working(value)
    source_name = random_source.choice(conversion.source.names)
    if value == 1 and len(source_name) > 2:
        source_name = source_name.removesuffix("s")
    question = random_source.choice(phrasings).format(
        value=value, source=source_name, target=random_source.choice(conversion.target.names)
    )
    return Draft(
        question=question,
        plan=plan,
        reply=f"{value} {conversion.source.sign} = {result} {conversion.target.sign}.",
        answer={"kind": "quantity", "value": result, "unit": conversion.target.sign},
        show_plan=conversion.hard,
    )
