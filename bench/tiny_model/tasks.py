"""All skills of the tiny model: endless examples whose answers code can check.

`generate` makes one, `stream` an endless mixture, `held_out_set` the questions of the evaluation,
and `check` says whether a generated text is right.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.tiny_model import (
    fact_tasks,
    json_tasks,
    list_tasks,
    number_tasks,
    out_of_scope,
    small_talk,
    tool_tasks,
    unit_tasks,
)
from bench.tiny_model.checks import check
from bench.tiny_model.example import Draft, Example, Make, Split, target_text

__all__ = ["SKILLS", "Example", "Skill", "check", "generate", "held_out_set", "stream"]


@dataclass(frozen=True)
class Skill:
    """How often the mixture has it, and what makes its questions."""

    weight: float
    make: Make


_FACTS = fact_tasks.makers()
_TALK = small_talk.makers()
SKILLS: dict[str, Skill] = {
    "capital": Skill(8, _FACTS["capital"]),
    "country_of_capital": Skill(6, _FACTS["country_of_capital"]),
    "currency": Skill(6, _FACTS["currency"]),
    "language": Skill(5, _FACTS["language"]),
    "continent": Skill(4, _FACTS["continent"]),
    "sum": Skill(10, number_tasks.sum_draft),
    "difference": Skill(10, number_tasks.difference_draft),
    "convert_units": Skill(5, unit_tasks.conversion_draft),
    "sort_numbers": Skill(5, list_tasks.sort_numbers_draft),
    "sort_words": Skill(4, list_tasks.sort_words_draft),
    "reverse_list": Skill(3, list_tasks.reverse_list_draft),
    "reverse_word": Skill(5, list_tasks.reverse_word_draft),
    "count_letter": Skill(5, list_tasks.count_letter_draft),
    "word_length": Skill(3, list_tasks.word_length_draft),
    "count_items": Skill(2, list_tasks.count_items_draft),
    "json_facts": Skill(6, json_tasks.json_facts_draft),
    "json_record": Skill(5, json_tasks.json_record_draft),
    "tool_call": Skill(7, tool_tasks.tool_call_draft),
    "tool_answer": Skill(3, tool_tasks.tool_answer_draft),
    "tool_not_needed": Skill(4, tool_tasks.tool_not_needed_draft),
    "tool_missing": Skill(2, tool_tasks.tool_missing_draft),
    "greeting": Skill(1, _TALK["greeting"]),
    "thanks": Skill(1, _TALK["thanks"]),
    "goodbye": Skill(0.5, _TALK["goodbye"]),
    "identity": Skill(1.5, _TALK["identity"]),
    "abilities": Skill(1, _TALK["abilities"]),
    out_of_scope.SKILL: Skill(6, out_of_scope.out_of_scope_draft),
}
# Skills whose short exchanges may stand before a question.
EARLIER_SKILLS = ("capital", "country_of_capital", "currency", "continent", "sum", "greeting")
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "Be concise.",
    "You are a patient teacher.",
    "Help the user.",
    "You answer questions.",
)
THINKING_OFF_SHARE = 0.35
SYSTEM_SHARE = 0.2
EARLIER_SHARE = 0.1


def generate(skill: str, split: Split, random_source: random.Random) -> Example:
    """One example of the skill. Raises KeyError for an unknown skill."""
    draft = SKILLS[skill].make(split, random_source)
    enable_thinking = random_source.random() >= THINKING_OFF_SHARE
    return Example(
        skill=skill,
        messages=_messages(draft, random_source),
        tools=list(draft.tools),
        enable_thinking=enable_thinking,
        target=target_text(draft, enable_thinking=enable_thinking),
        answer=draft.answer,
    )


def stream(split: Split, seed: int | str) -> Iterator[Example]:
    """An endless mixture by the skills' weights: the same examples for the same seed."""
    random_source = random.Random(f"{split}:{seed}")
    names, weights = list(SKILLS), [skill.weight for skill in SKILLS.values()]
    while True:
        yield generate(random_source.choices(names, weights)[0], split, random_source)


def held_out_set(n_per_skill: int, seed: int = 0) -> list[Example]:
    """`n_per_skill` held-out examples of every skill, in the order of SKILLS.

    A question may come twice where a skill has few held-out ones.
    """
    examples = []
    for skill in SKILLS:
        # A source for each skill: a new skill leaves the others' questions as they were.
        random_source = random.Random(f"held_out:{seed}:{skill}")
        examples += (generate(skill, "held_out", random_source) for _ in range(n_per_skill))
    return examples


def _messages(draft: Draft, random_source: random.Random) -> list[dict[str, Any]]:
    system = draft.system
    if system is None and random_source.random() < SYSTEM_SHARE:
        system = random_source.choice(SYSTEM_MESSAGES)
    earlier = draft.earlier
    # Prompts with tools are long as they are.
    if earlier is None and not draft.tools and random_source.random() < EARLIER_SHARE:
        earlier = _earlier(draft, random_source)
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if earlier is not None:
        messages.append({"role": "user", "content": earlier[0]})
        messages.append({"role": "assistant", "content": earlier[1]})
    return [*messages, {"role": "user", "content": draft.question}, *draft.later]


def _earlier(draft: Draft, random_source: random.Random) -> tuple[str, str]:
    """A short exchange of training that doesn't give the answer away."""
    while True:
        skill = SKILLS[random_source.choice(EARLIER_SKILLS)]
        other = skill.make("train", random_source)
        if other.earlier is None and other.reply != draft.reply:
            return other.question, other.reply
