"""Answers as a JSON object with the keys that the question names, in its order."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.tiny_model.example import Draft, Split
from bench.tiny_model.facts import Country, countries
from bench.tiny_model.splits import operands_fit, phrasings_of
from bench.tiny_model.words import CITIES, FIRST_NAMES, NOUNS, WEEKDAYS

FACT_KEYS: dict[str, Callable[[Country], str | None]] = {
    "country": lambda country: country.name,
    "capital": lambda country: country.capital,
    "currency": lambda country: country.currency,
    "currency_code": lambda country: country.currency_code,
    "language": lambda country: country.language,
    "continent": lambda country: country.continent,
}
FACT_PHRASINGS = (
    "Describe {subject} as JSON with the keys {keys}.",
    "Give me {subject} as a JSON object with the keys {keys}.",
    "Return a JSON object with the keys {keys} for {subject}.",
    "Answer as JSON with the keys {keys}: what do you know about {subject}?",
    "Write JSON about {subject}. Keys: {keys}.",
    "Fill in this JSON for {subject}: {shape}",
    "Complete the JSON {shape} for {subject}.",
    "I need {keys} of {subject} as JSON.",
    "JSON with {keys} for {subject}, please.",
    "Tell me about {subject} in JSON, keys {keys}.",
)
FACT_SYSTEM = (
    "Reply only with a JSON object with the keys {keys}.",
    "Answer in JSON. Keys: {keys}.",
    "You get the name of a country. Return JSON with the keys {keys}.",
)
FACT_QUESTIONS_UNDER_SYSTEM = ("{subject}", "Country: {subject}", "Tell me about {subject}.")
RECORD_PHRASINGS = (
    "Turn this into JSON with the keys {keys}: {text}",
    "Write this as JSON with the keys {keys}: {text}",
    "Extract {keys} as JSON: {text}",
    "Return a JSON object with {keys} from this text: {text}",
    "Answer as JSON with the keys {keys}. {text}",
    "{text} Give me that as JSON with the keys {keys}.",
    "{text} Put this into the JSON {shape}",
    "Fill in {shape} from this text: {text}",
    "JSON with {keys}, please: {text}",
)
RECORD_SYSTEM = (
    "Extract {keys} from the user's text as JSON.",
    "Reply only with a JSON object with the keys {keys}.",
    "Answer in JSON. Keys: {keys}.",
)
SYSTEM_SHARE = 0.2
EVENTS = ("concert", "meeting", "party", "lesson", "race", "market", "lecture", "match")


@dataclass(frozen=True)
class Record:
    """An invented record: how to draw its fields, and the sentences that tell them."""

    draw: Callable[[random.Random], dict[str, Any]]
    sentences: tuple[str, ...]


RECORDS = (
    Record(
        lambda source: {
            "name": source.choice(FIRST_NAMES),
            "age": source.randint(18, 99),
            "city": source.choice(CITIES),
        },
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} lives in {city} and is {age} years old.",
            "In {city} lives {name}, who is {age}.",
            "My name is {name}, I am {age} and I come from {city}.",
        ),
    ),
    Record(
        lambda source: {
            "item": source.choice(NOUNS),
            "price": source.randint(2, 99),
            "quantity": source.randint(2, 50),
        },
        (
            "We sold {quantity} pieces of {item} at {price} dollars each.",
            "{item}, price {price} dollars, {quantity} in stock",
            "There are {quantity} of the item {item}, and each costs {price} dollars.",
            "The {item} costs {price} dollars and we have {quantity}.",
        ),
    ),
    Record(
        lambda source: {
            "event": source.choice(EVENTS),
            "city": source.choice(CITIES),
            "day": source.choice(WEEKDAYS),
            "hour": source.randint(7, 22),
        },
        (
            "The {event} in {city} is on {day} at {hour} o'clock.",
            "On {day} at {hour} o'clock there is a {event} in {city}.",
            "There is a {event} in {city} on {day} at {hour} o'clock.",
        ),
    ),
    Record(
        lambda source: {
            "name": source.choice(FIRST_NAMES),
            "item": source.choice(NOUNS),
            "quantity": source.randint(2, 50),
            "order": source.randint(100, 999),
        },
        (
            "Order {order} is from {name}: {quantity} times {item}.",
            "{name} wants {quantity} of the item {item}, order number {order}.",
            "{name} ordered {item}, quantity {quantity}, order {order}.",
        ),
    ),
)


def json_facts_draft(split: Split, random_source: random.Random) -> Draft:
    """Facts of a country in a given shape."""
    country = random_source.choice(countries())
    known = {key: value for key, of in FACT_KEYS.items() if (value := of(country)) is not None}
    keys = random_source.sample(sorted(known), random_source.randint(2, 4))
    if "country" in keys:
        # Where people put it.
        keys.sort(key=lambda key: key != "country")
    system = None
    phrasings = FACT_PHRASINGS
    if random_source.random() < SYSTEM_SHARE:
        system = random_source.choice(FACT_SYSTEM).format(keys=_listed(keys, random_source))
        phrasings = FACT_QUESTIONS_UNDER_SYSTEM
    key = ("json_facts", country.code, system is None)
    phrasing = random_source.choice(phrasings_of(split, key, phrasings))
    question = phrasing.format(
        subject=country.in_sentence if " " in phrasing else country.name,
        keys=_listed(keys, random_source),
        shape=_shape(keys),
    )
    return _draft(question, {key: known[key] for key in keys}, system)


def json_record_draft(split: Split, random_source: random.Random) -> Draft:
    """An invented record out of a sentence."""
    record = random_source.choice(RECORDS)
    fields = record.draw(random_source)
    while not operands_fit(split, "record", *fields.items()):
        fields = record.draw(random_source)
    fewest = max(2, len(fields) - 1)
    keys = random_source.sample(sorted(fields), random_source.randint(fewest, len(fields)))
    text = random_source.choice(record.sentences).format(**fields)
    question, system = text, None
    if random_source.random() < SYSTEM_SHARE:
        system = random_source.choice(RECORD_SYSTEM).format(keys=_listed(keys, random_source))
    else:
        question = random_source.choice(RECORD_PHRASINGS).format(
            keys=_listed(keys, random_source), shape=_shape(keys), text=text
        )
    return _draft(question, {key: fields[key] for key in keys}, system)


def _draft(question: str, value: dict[str, Any], system: str | None) -> Draft:
    return Draft(
        question=question,
        plan=f"JSON with the keys {', '.join(value)}.",
        reply=json.dumps(value),
        answer={"kind": "json", "value": value},
        system=system,
    )


def _listed(keys: list[str], random_source: random.Random) -> str:
    style = random_source.randrange(3)
    if style == 0:
        return ", ".join(keys)
    shown = keys if style == 1 else [f'"{key}"' for key in keys]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _shape(keys: list[str]) -> str:
    return "{" + ", ".join(f'"{key}": ...' for key in keys) + "}"
