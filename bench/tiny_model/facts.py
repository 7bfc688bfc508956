"""The country table (facts.json) and how a sentence names a country."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

ARTICLE = "the "


@dataclass(frozen=True)
class Country:
    """One country. `language` is None where sources disagree on the main one."""

    code: str
    name: str
    article: bool
    capital: str
    currency: str
    currency_code: str
    language: str | None
    continent: str

    @property
    def in_sentence(self) -> str:
        """The name as it stands inside a sentence: with "the" where English has it."""
        return ARTICLE + self.name if self.article else self.name


@cache
def countries() -> tuple[Country, ...]:
    """All countries, by name."""
    content = json.loads((resources.files("bench.tiny_model") / "facts.json").read_bytes())
    return tuple(Country(**entry) for entry in content["countries"])


@cache
def currency_names() -> dict[str, str]:
    """Currency name by code, of every currency in the table."""
    return {country.currency_code: country.currency for country in countries()}
