"""Tools: call one, answer from what it returned, leave them alone, say that one is missing."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.tiny_model import fact_tasks, small_talk
from bench.tiny_model.example import Draft, Split
from bench.tiny_model.facts import currency_names
from bench.tiny_model.number_tasks import (
    DIFFERENCE_PHRASINGS,
    SUM_PHRASINGS,
    random_pair,
)
from bench.tiny_model.splits import operands_fit, pair_fits, phrasings_of
from bench.tiny_model.words import CITIES, TOPICS

WEATHER_PHRASINGS = (
    "What is the weather in {city}?",
    "What's the weather like in {city}?",
    "How is the weather in {city}?",
    "How warm is it in {city}?",
    "Is it raining in {city}?",
    "Tell me the weather in {city}.",
    "Do I need an umbrella in {city}?",
    "Weather in {city}?",
    "What is the temperature in {city} now?",
    "I am going to {city}. What is the weather there?",
    "Check the weather in {city}, please.",
)
CONVERT_PHRASINGS = (
    "Convert {amount} {source} to {target}.",
    "How much is {amount} {source} in {target}?",
    "What are {amount} {source} in {target}?",
    "Exchange {amount} {source} into {target}.",
    "How many {target} do I get for {amount} {source}?",
    "{amount} {source} in {target}?",
    "Please convert {amount} {source} into {target}.",
)
PRODUCT_PHRASINGS = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
    "{a} * {b} = ?",
    "Calculate {a} * {b}.",
    "What is the product of {a} and {b}?",
    "Work out {a} times {b}, please.",
)
SEARCH_PHRASINGS = (
    "Search for {topic}.",
    "Search the web for {topic}.",
    "Find news about {topic}.",
    "Look up {topic} online.",
    "Find something about {topic} on the web.",
    "What is new about {topic}?",
    "Find me an article about {topic}.",
    "Can you search for {topic}?",
)
WEATHERS = ("rain", "snow", "sun", "clouds", "fog", "wind", "storms", "hail")
TITLES = (
    "A short guide to {topic}",
    "All about {topic}",
    "What you should know about {topic}",
    "The history of {topic}",
    "Ten questions about {topic}",
    "News about {topic}",
)
PRODUCT_SIZES = {(2, 1): 2, (2, 2): 6, (3, 2): 3, (3, 3): 1}
# How many tools stand beside the first, and how often. Each costs about 65 tokens of prompt.
OTHER_TOOLS = {0: 6, 1: 4}


@dataclass(frozen=True)
class Need:
    """A question that a tool answers.

    arguments: of the call, by the first spelling of the parameter's name.
    result: what the tool returns. reply, mentions: the answer from it and what that must hold.
    """

    question: str
    arguments: dict[str, Any]
    result: str
    reply: str
    mentions: list[str]


@dataclass(frozen=True)
class Kind:
    """A kind of tool.

    names, descriptions: one of each is drawn. parameters: JSON type by its possible names.
    purpose: what it is for, as the reply names it where the tool is missing.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: dict[tuple[str, ...], str]
    purpose: str
    need: Callable[[Split, random.Random], Need]


def weather_need(split: Split, random_source: random.Random) -> Need:
    city = random_source.choice(CITIES)
    phrasings = phrasings_of(split, ("weather", city), WEATHER_PHRASINGS)
    degrees, sky = random_source.randint(-15, 35), random_source.choice(WEATHERS)
    return Need(
        random_source.choice(phrasings).format(city=city),
        {"city": city},
        json.dumps({"city": city, "temperature": degrees, "weather": sky}),
        f"In {city} it is {degrees} °C with {sky}.",
        [str(degrees), sky],
    )


def convert_need(split: Split, random_source: random.Random) -> Need:
    while True:
        amount = random_source.randint(2, 999)
        source, target = random_source.sample(sorted(currency_names()), 2)
        if operands_fit(split, "convert", amount, source, target):
            break
    result = round(amount * random_source.uniform(0.2, 9.0), random_source.choice((0, 1)))
    shown = f"{result:g}" if result < 1000 else f"{result:.0f}"
    return Need(
        random_source.choice(CONVERT_PHRASINGS).format(amount=amount, source=source, target=target),
        {"amount": amount, "from": source, "to": target},
        f'{{"amount": {shown}, "currency": "{target}"}}',
        f"{amount} {source} is {shown} {target}.",
        [shown, target],
    )


def calculator_need(split: Split, random_source: random.Random) -> Need:
    while True:
        a, b = random_pair(split, random_source, PRODUCT_SIZES)
        if a < b:
            a, b = b, a
        if pair_fits(split, a, b):
            break
    sign, phrasings, result = random_source.choice(
        (
            ("*", PRODUCT_PHRASINGS, a * b),
            ("*", PRODUCT_PHRASINGS, a * b),
            ("+", SUM_PHRASINGS, a + b),
            ("-", DIFFERENCE_PHRASINGS, a - b),
        )
    )
    return Need(
        random_source.choice(phrasings).format(a=a, b=b),
        {"expression": f"{a} {sign} {b}"},
        str(result),
        f"{a} {sign} {b} = {result}.",
        [str(result)],
    )


def search_need(split: Split, random_source: random.Random) -> Need:
    topic = random_source.choice(TOPICS)
    phrasings = phrasings_of(split, ("search", topic), SEARCH_PHRASINGS)
    title = random_source.choice(TITLES).format(topic=topic)
    return Need(
        random_source.choice(phrasings).format(topic=topic),
        {"query": topic},
        json.dumps({"title": title}),
        f'I found "{title}".',
        [title],
    )


KINDS = (
    Kind(
        ("weather", "get_weather"),
        ("Current weather in a city", "Get the weather of a city"),
        {("city", "location"): "string"},
        "the weather",
        weather_need,
    ),
    Kind(
        ("convert", "convert_currency"),
        ("Convert money between currencies", "Exchange one currency into another"),
        {("amount",): "number", ("from",): "string", ("to",): "string"},
        "exchange rates",
        convert_need,
    ),
    Kind(
        ("calculator", "calculate"),
        ("Compute an expression", "Calculate the value of an expression"),
        {("expression",): "string"},
        "multiplication",
        calculator_need,
    ),
    Kind(
        ("search", "web_search"),
        ("Search the web", "Find pages on the web"),
        {("query",): "string"},
        "searching the web",
        search_need,
    ),
)


def tool_call_draft(split: Split, random_source: random.Random) -> Draft:
    """A question that an offered tool answers: the reply is the call."""
    kind = random_source.choice(KINDS)
    need = kind.need(split, random_source)
    tool, arguments = _offer(kind, need, random_source)
    others = [other for other in KINDS if other is not kind]
    name = tool["function"]["name"]
    return Draft(
        question=need.question,
        plan=f"I need the tool {name}.",
        reply=call_text(name, arguments),
        answer={"kind": "tool_call", "name": name, "arguments": arguments},
        tools=_with_others(tool, others, random_source),
    )


def tool_answer_draft(split: Split, random_source: random.Random) -> Draft:
    """The tool has answered: the reply says what it returned."""
    kind = random_source.choice(KINDS)
    need = kind.need(split, random_source)
    tool, arguments = _offer(kind, need, random_source)
    call = {
        "type": "function",
        "function": {"name": tool["function"]["name"], "arguments": arguments},
    }
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if random_source.random() < 0.5:
        # Some clients hand the thoughts back, most don't.
        asked["reasoning_content"] = f"I need the tool {tool['function']['name']}."
    return Draft(
        question=need.question,
        plan="The tool has answered.",
        reply=need.reply,
        answer={"kind": "mentions", "value": need.mentions},
        later=(asked, {"role": "tool", "content": need.result}),
        tools=(tool,),
    )


def tool_not_needed_draft(split: Split, random_source: random.Random) -> Draft:
    """Tools are offered, but the question needs none of them."""
    if random_source.random() < 0.75:
        fact = random_source.choice(fact_tasks.FACTS)
        draft = fact_tasks.fact_draft(fact, split, random_source)
        while draft.earlier is not None:
            # Two turns and two tools are longer than the longest row.
            draft = fact_tasks.fact_draft(fact, split, random_source)
    else:
        talk = random_source.choice(small_talk.SMALL_TALK)
        draft = small_talk.small_talk_draft(talk, split, random_source)
    return replace(draft, tools=_some_tools(KINDS, random_source))


def tool_missing_draft(split: Split, random_source: random.Random) -> Draft:
    """The question needs a tool that isn't offered."""
    kind = random_source.choice(KINDS)
    need = kind.need(split, random_source)
    while kind.need is calculator_need and "*" not in need.arguments["expression"]:
        need = kind.need(split, random_source)
    others = [other for other in KINDS if other is not kind]
    tools = _some_tools(others, random_source) if random_source.random() < 0.5 else ()
    return Draft(
        question=need.question,
        plan=f"This needs a tool for {kind.purpose}, and there is none.",
        reply=f"I have no tool for {kind.purpose}.",
        answer={"kind": "mentions", "value": ["no tool", kind.purpose]},
        tools=tools,
    )


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the chat template writes it."""
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _offer(
    kind: Kind, need: Need, random_source: random.Random
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tool's definition, and the need's arguments under its parameter names."""
    tool = _definition(kind, random_source)
    names = tool["function"]["parameters"]["properties"]
    return tool, dict(zip(names, need.arguments.values(), strict=True))


def _definition(kind: Kind, random_source: random.Random) -> dict[str, Any]:
    properties = {
        random_source.choice(names): {"type": json_type}
        for names, json_type in kind.parameters.items()
    }
    return {
        "type": "function",
        "function": {
            "name": random_source.choice(kind.names),
            "description": random_source.choice(kind.descriptions),
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }


def _with_others(
    tool: dict[str, Any], others: Sequence[Kind], random_source: random.Random
) -> tuple[dict[str, Any], ...]:
    count = random_source.choices(list(OTHER_TOOLS), list(OTHER_TOOLS.values()))[0]
    tools = [
        tool,
        *(_definition(kind, random_source) for kind in random_source.sample(others, count)),
    ]
    random_source.shuffle(tools)
    return tuple(tools)


def _some_tools(kinds: Sequence[Kind], random_source: random.Random) -> tuple[dict[str, Any], ...]:
    count = 1 + random_source.choices(list(OTHER_TOOLS), list(OTHER_TOOLS.values()))[0]
    return tuple(_definition(kind, random_source) for kind in random_source.sample(kinds, count))
