"""Questions that the model was not made for, and its one answer: that it doesn't know.

Without them a model this small answers a question about a poem with a fact about Tonga.
"""

import random
import string
from collections.abc import Callable
from string import Formatter

from bench.tiny_model.example import Draft, Split
from bench.tiny_model.facts import countries
from bench.tiny_model.splits import operands_fit
from bench.tiny_model.words import CITIES, CONSONANTS, FIRST_NAMES, NOUNS, TOPICS, VOWELS

SKILL = "out_of_scope"
PLAN = "This is nothing that I know about."
REPLY = "I don't know that. Ask me about countries, numbers, lists, units or JSON."
MENTIONS = ("I don't know",)
QUESTIONS = (
    *(
        "Write a poem about {topic}.",
        "Write a poem about the {noun}.",
        "Write a story about {name}",
    ),
    *("Write a letter to {name}.", "Write a song about a {noun}", "Tell me a story about {topic}."),
    *("Tell me a joke.", "Tell me a joke about a {noun}", "Tell me something funny", "Sing a song"),
    *("Write a Python function that draws a {noun}.", "Write code for a {noun} game"),
    *("Explain {topic} in one sentence.", "Explain {topic}", "Explain how a {noun} works."),
    *("What do you think about {topic}?", "Do you like {topic}?", "What is your favorite {noun}?"),
    *("Who was {name} {surname}?", "Who is {name} {surname}?", "When was {name} {surname} born?"),
    *("Who invented the {noun}?", "Who wrote the book about {topic}?", "Who won the match?"),
    *("What is {topic}?", "What is a {noun}?", "What does {noun} mean?", "What is a {made_up}?"),
    *("What is the meaning of {topic}?", "What is the meaning of life?", "Why is the {noun} blue?"),
    *("Why do people like {topic}?", "Why are there {noun}s in {city}?", "How do I make a {noun}?"),
    *("How do I get from {city} to {other_city}?", "How far is {city} from {other_city}?"),
    *("Is {city} in {country}?", "Is {city} bigger than {other_city}?", "Where is {city}?"),
    *("What is the population of {country}?", "How many people live in {country}?"),
    *("How big is {country}?", "Who is the president of {country}?", "Who rules {country}?"),
    *("What is the flag of {country}?", "What do people eat in {country}?"),
    *("What is the capital of {place}?", "What is the currency of {place}?", "Where is {place}?"),
    *("What language do people speak in {place}?", "Which continent is {place} on?"),
    *("Which country has the capital {place}?", "What is the history of {country}?"),
    *("Translate {noun} into French.", "Translate this into German: {noun} and {other_noun}"),
    *("How do you say {noun} in Spanish?", "What rhymes with {noun}?", "Is a {noun} heavy?"),
    *("Recommend a book about {topic}.", "Give me a recipe with {noun} and {other_noun}."),
    *("Summarize {topic}.", "Draw a {noun}.", "What color is a {noun}?", "Play some music"),
    *("Which is better, the {noun} or the {other_noun}?", "What happened in {year}?"),
    *("Who was king in {year}?", "Plan a trip to {city}.", "What should I cook today?"),
    *("{keys}", "{keys} {other_keys}", "{made_up}", "{made_up} {noun}", "{noun}?", "{noun}"),
    *("Bonjour!", "Merci!", "Hola, como estas?", "Wie heisst du?", "Was ist das?", "Ciao {name}"),
    *("Quelle est la capitale de {country}?", "Cual es la capital de {country}?"),
    *("Was ist die Hauptstadt von {country}?", "Qual e a capital de {country}?", "Danke {name}!"),
    *("{made_up} {made_up_too} {noun} {keys}", "I am sad.", "I like {topic}.", "I have a {noun}."),
    *(
        "My name is {name}.",
        "My {noun} is broken.",
        "The {noun} is in the {other_noun}.",
        "ok",
        "?",
    ),
    *("What time is it?", "What day is today?", "Are you happy?", "Do you sleep?", "Help {name}!"),
    *("Convert {number} {noun}s to {other_noun}s.", "Convert {number} km to miles", "asdf {keys}"),
    *("Convert {number} pounds to euros.", "How many inches are {number} miles?", "test", "foo"),
)
SURNAMES = (
    *("Einstein", "Curie", "Newton", "Smith", "Garcia", "Kim", "Meyer", "Rossi", "Silva", "Tanaka"),
    *("Mozart", "Austen", "Darwin", "Lovelace", "Turing", "Picasso", "Bach", "Gandhi", "Columbus"),
)


def out_of_scope_draft(split: Split, random_source: random.Random) -> Draft:
    """A question about anything else; whole texts are held out."""
    while True:
        question = random_source.choice(QUESTIONS)
        fields = [field for _, field, _, _ in Formatter().parse(question) if field is not None]
        question = question.format(**{field: FILLERS[field](random_source) for field in fields})
        if random_source.random() < 0.3:
            question = question.lower()
        if random_source.random() < 0.3:
            question = question.rstrip(".?!")
        if question and operands_fit(split, SKILL, question.lower().rstrip(".?!")):
            break
    return Draft(
        question=question,
        plan=PLAN,
        reply=REPLY,
        answer={"kind": "mentions", "value": list(MENTIONS)},
    )


def _made_up(random_source: random.Random) -> str:
    return "".join(
        random_source.choice(letters)
        for _ in range(random_source.randint(2, 4))
        for letters in (CONSONANTS, VOWELS)
    )


def _keys(random_source: random.Random) -> str:
    return "".join(random_source.choices(string.ascii_lowercase, k=random_source.randint(3, 9)))


def _place(random_source: random.Random) -> str:
    """A country that there isn't."""
    end = random_source.choice(("ia", "land", "stan", "ona", "is", "eth", "or", ""))
    if random_source.random() < 0.2:
        return random_source.choice(("Atlantis", "Narnia", "Gondor", "Utopia", "the Moon", "Mars"))
    return _made_up(random_source).capitalize().rstrip(VOWELS) + end


def _one_of(values: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda random_source: random_source.choice(values)


_COUNTRIES = tuple(country.in_sentence for country in countries())
FILLERS: dict[str, Callable[[random.Random], str]] = {
    "topic": _one_of(TOPICS),
    "noun": _one_of(NOUNS),
    "other_noun": _one_of(NOUNS),
    "name": _one_of(FIRST_NAMES),
    "surname": _one_of(SURNAMES),
    "city": _one_of(CITIES),
    "other_city": _one_of(CITIES),
    "country": _one_of(_COUNTRIES),
    "place": _place,
    "made_up": _made_up,
    "made_up_too": _made_up,
    "keys": _keys,
    "other_keys": _keys,
    "year": lambda random_source: str(random_source.randint(1000, 2030)),
    "number": lambda random_source: str(random_source.randint(2, 500)),
}
