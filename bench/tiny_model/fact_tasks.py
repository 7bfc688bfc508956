"""Questions about countries: capital, currency, main language, continent."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from bench.tiny_model.example import Draft, Make, Split
from bench.tiny_model.facts import Country, countries
from bench.tiny_model.splits import phrasings_of

FOLLOW_UPS = (
    "And {subject}?",
    "What about {subject}?",
    "And for {subject}?",
    "How about {subject}?",
    "Now {subject}, please.",
    "The same for {subject}?",
    "Do the same for {subject}.",
)


@dataclass(frozen=True)
class Fact:
    """What one skill asks for of a country.

    subject, value: what the question names and what it wants, of a country.
    plan, reply: text with {subject} and {value}; a leading {Subject} is capitalised.
    """

    skill: str
    phrasings: tuple[str, ...]
    subject: Callable[[Country], str]
    value: Callable[[Country], str | None]
    plan: str
    reply: str


FACTS = (
    Fact(
        skill="capital",
        phrasings=(
            "What is the capital of {subject}?",
            "What's the capital of {subject}?",
            "What is the capital city of {subject}?",
            "Which city is the capital of {subject}?",
            "Name the capital of {subject}.",
            "Tell me the capital of {subject}.",
            "Tell me the capital city of {subject}, please.",
            "Do you know the capital of {subject}?",
            "Can you tell me the capital of {subject}?",
            "I need the capital of {subject}.",
            "The capital of {subject} is what?",
            "The capital of {subject} is",
            "{Subject}: capital?",
            "Capital of {subject}?",
            "What city is {subject} governed from?",
            "In a quiz I am asked for the capital of {subject}. What do I say?",
            "Please name the capital city of {subject}.",
            "What is {subject}'s capital?",
        ),
        subject=lambda country: country.in_sentence,
        value=lambda country: country.capital,
        plan="The user asks for the capital of {subject}.",
        reply="The capital of {subject} is {value}.",
    ),
    Fact(
        skill="country_of_capital",
        phrasings=(
            "Which country has the capital {subject}?",
            "{Subject} is the capital of which country?",
            "What country is {subject} the capital of?",
            "Of which country is {subject} the capital?",
            "Name the country whose capital is {subject}.",
            "Tell me which country has {subject} as its capital.",
            "Which state is governed from {subject}?",
            "The capital is {subject}. What is the country?",
            "{Subject} is the capital of what?",
            "{Subject} is the capital of",
            "Whose capital is {subject}?",
            "Which country's capital city is {subject}?",
            "Do you know which country {subject} is the capital of?",
            "I am in the capital city {subject}. Which country am I in?",
            "Capital {subject}, which country?",
            "Please name the country with the capital {subject}.",
        ),
        subject=lambda country: country.capital,
        value=lambda country: country.in_sentence,
        plan="The user asks which country has the capital {subject}.",
        reply="{Subject} is the capital of {value}.",
    ),
    Fact(
        skill="currency",
        phrasings=(
            "What is the currency of {subject}?",
            "What's the currency of {subject}?",
            "Which currency does {subject} use?",
            "What currency is used in {subject}?",
            "What money do people use in {subject}?",
            "Name the currency of {subject}.",
            "Tell me the currency of {subject}.",
            "What is the currency code of {subject}?",
            "Which currency code does {subject} have?",
            "How do I pay in {subject}: in which currency?",
            "I travel to {subject}. Which money do I need?",
            "Which money is used in {subject}?",
            "Currency of {subject}?",
            "{Subject}: currency?",
            "The currency of {subject} is",
            "Can you tell me what currency {subject} uses?",
            "Do you know the currency of {subject}?",
            "What do people pay with in {subject}?",
        ),
        subject=lambda country: country.in_sentence,
        value=lambda country: f"{country.currency} ({country.currency_code})",
        plan="The user asks for the currency of {subject}.",
        reply="The currency of {subject} is the {value}.",
    ),
    Fact(
        skill="language",
        phrasings=(
            "What is the main language of {subject}?",
            "What's the main language of {subject}?",
            "Which language is spoken in {subject}?",
            "What language do people speak in {subject}?",
            "Which language do people in {subject} speak?",
            "Name the main language of {subject}.",
            "Tell me the main language of {subject}.",
            "What is the official language of {subject}?",
            "Which official language does {subject} have?",
            "What language is used in {subject}?",
            "I travel to {subject}. Which language should I learn?",
            "Language of {subject}?",
            "{Subject}: language?",
            "The main language of {subject} is",
            "Can you tell me which language they speak in {subject}?",
            "Do you know the language of {subject}?",
            "What do people speak in {subject}?",
        ),
        subject=lambda country: country.in_sentence,
        value=lambda country: country.language,
        plan="The user asks for the language of {subject}.",
        reply="The main language of {subject} is {value}.",
    ),
    Fact(
        skill="continent",
        phrasings=(
            "On which continent is {subject}?",
            "Which continent is {subject} on?",
            "Which continent is {subject} in?",
            "What continent is {subject} part of?",
            "What is the continent of {subject}?",
            "Name the continent of {subject}.",
            "Tell me the continent of {subject}.",
            "Tell me which continent {subject} is on.",
            "To which continent does {subject} belong?",
            "On what continent do I find {subject}?",
            "Where in the world is {subject}: on which continent?",
            "Continent of {subject}?",
            "{Subject}: continent?",
            "The continent of {subject} is",
            "Can you tell me which continent {subject} is in?",
            "Do you know the continent of {subject}?",
        ),
        subject=lambda country: country.in_sentence,
        value=lambda country: country.continent,
        plan="The user asks for the continent of {subject}.",
        reply="{Subject} is in {value}.",
    ),
)
CASUAL_SHARE = 0.05
FOLLOW_UP_SHARE = 0.12


def fill(template: str, subject: str, value: str = "") -> str:
    """`template` with {subject}, {Subject} (its first letter in upper case) and {value} filled."""
    return template.format(subject=subject, Subject=subject[0].upper() + subject[1:], value=value)


@cache
def known_countries(fact: Fact) -> tuple[Country, ...]:
    """The countries whose fact the table has."""
    return tuple(country for country in countries() if fact.value(country) is not None)


def fact_draft(fact: Fact, split: Split, random_source: random.Random) -> Draft:
    """A question about one country; at times as a follow-up to one about another."""
    country = random_source.choice(known_countries(fact))
    subject, value = fact.subject(country), fact.value(country)
    assert value is not None
    earlier = None
    phrasings = fact.phrasings
    if random_source.random() < FOLLOW_UP_SHARE:
        phrasings = FOLLOW_UPS
        earlier = _earlier(fact, country, random_source)
    # Follow-ups have a key of their own, so that each list keeps its own held-out phrasings.
    key = (fact.skill, country.code, phrasings is FOLLOW_UPS)
    question = fill(random_source.choice(phrasings_of(split, key, phrasings)), subject)
    # Not in held-out questions, which would then measure spelling as well.
    if split == "train" and random_source.random() < CASUAL_SHARE:
        question = question.lower().rstrip("?.")
    return Draft(
        question=question,
        plan=fill(fact.plan, subject),
        reply=fill(fact.reply, subject, value),
        answer={"kind": fact.skill, "subject": subject, "value": value, "country": country.code},
        earlier=earlier,
    )


def _earlier(fact: Fact, country: Country, random_source: random.Random) -> tuple[str, str]:
    """The same question about another country, in a phrasing of training."""
    other = random_source.choice([some for some in known_countries(fact) if some != country])
    subject, value = fact.subject(other), fact.value(other)
    assert value is not None
    phrasings = phrasings_of("train", (fact.skill, other.code, False), fact.phrasings)
    question = fill(random_source.choice(phrasings), subject)
    return question, fill(fact.reply, subject, value)


def makers() -> dict[str, Make]:
    """The generator of each fact skill."""

    def maker(fact: Fact) -> Make:
        return lambda split, random_source: fact_draft(fact, split, random_source)

    return {fact.skill: maker(fact) for fact in FACTS}
