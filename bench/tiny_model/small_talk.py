"""Greetings, thanks, goodbyes, and who the model is."""

import random
from dataclasses import dataclass
from itertools import product

from bench.tiny_model.example import Draft, Make, Split
from bench.tiny_model.splits import operands_fit


@dataclass(frozen=True)
class SmallTalk:
    """What people say, as openings x cores x endings, and the one reply.

    mentions: what a right reply holds.
    """

    skill: str
    openings: tuple[str, ...]
    cores: tuple[str, ...]
    endings: tuple[str, ...]
    plan: str
    reply: str
    mentions: tuple[str, ...]


SMALL_TALK = (
    SmallTalk(
        "greeting",
        ("",),
        (
            *("Hi", "Hello", "Hey", "Good morning", "Good evening", "Good afternoon", "Hi there"),
            *("Hello there", "Hey there", "Greetings", "hi", "hello", "hey", "Good day", "Howdy"),
        ),
        ("", "!", ".", ", how are you?", ". How are you?", " :)", "! Nice to meet you.", ", you!"),
        "The user greets me.",
        "Hello! What can I do for you?",
        ("Hello",),
    ),
    SmallTalk(
        "thanks",
        ("", "Great, ", "OK, ", "Perfect, ", "Good, "),
        (
            *("thanks", "thank you", "thank you very much", "thanks a lot", "many thanks"),
            *("thanks, that helps", "thank you, that was helpful", "thank you so much"),
        ),
        ("!", ".", ""),
        "The user thanks me.",
        "You're welcome!",
        ("welcome",),
    ),
    SmallTalk(
        "goodbye",
        ("", "OK, ", "I have to go, ", "That is all, "),
        ("goodbye", "bye", "see you", "see you later", "bye for now", "have a nice day", "bye bye"),
        ("!", ".", ""),
        "The user says goodbye.",
        "Goodbye!",
        ("Goodbye",),
    ),
    SmallTalk(
        "identity",
        ("", "Hi! ", "Hello, ", "Please tell me: ", "Tell me, "),
        (
            *("who are you", "what are you", "what is your name", "what model are you"),
            *("which model is this", "what kind of model are you", "are you Qwen", "who made you"),
            *("what model am I talking to", "introduce yourself", "tell me about yourself"),
            *("are you a large model", "are you a human", "are you an AI", "how big are you"),
        ),
        ("?", "", "??"),
        "The user asks who I am.",
        "I am a tiny Qwen3.5-shaped model, trained from scratch as the embedded default of "
        "qwen35-jax.",
        ("tiny", "qwen35-jax"),
    ),
    SmallTalk(
        "abilities",
        ("", "Hi! ", "Hello, ", "Please tell me: ", "Tell me, "),
        (
            *("what can you do", "what do you know", "what are you good at", "how can you help me"),
            *("what can I ask you", "what are your skills", "what can you help with"),
            *("which questions can you answer", "what should I ask you", "can you help me"),
        ),
        ("?", "", "??"),
        "The user asks what I can do.",
        "I know the countries of the world, and I can add, subtract, sort, reverse, count, convert "
        "units, write JSON and call tools.",
        ("countries", "JSON", "tools"),
    ),
)


def small_talk_draft(talk: SmallTalk, split: Split, random_source: random.Random) -> Draft:
    """Something people say of this kind; whole texts are held out."""
    while True:
        texts = (talk.openings, talk.cores, talk.endings)
        opening, core, ending = (random_source.choice(part) for part in texts)
        text = opening + core + ending
        # A sentence starts with a capital unless the core is a greeting typed in haste.
        if talk.skill != "greeting" and random_source.random() < 0.8:
            text = text[0].upper() + text[1:]
        if operands_fit(split, talk.skill, text.lower()):
            break
    return Draft(
        question=text,
        plan=talk.plan,
        reply=talk.reply,
        answer={"kind": "mentions", "value": list(talk.mentions)},
    )


def all_texts(talk: SmallTalk) -> list[str]:
    """Everything that people say of this kind, as written in the table."""
    return ["".join(parts) for parts in product(talk.openings, talk.cores, talk.endings)]


def makers() -> dict[str, Make]:
    """The generator of each kind of small talk."""

    def maker(talk: SmallTalk) -> Make:
        return lambda split, random_source: small_talk_draft(talk, split, random_source)

    return {talk.skill: maker(talk) for talk in SMALL_TALK}
