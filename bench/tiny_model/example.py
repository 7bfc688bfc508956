"""The shape of a training example, and of a generator's draft of one."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

Split = Literal["train", "held_out"]
THINK_END = "\n</think>\n\n"


class Example(TypedDict):
    """A conversation up to the assistant's turn, that turn, and what a checker needs.

    messages, tools, enable_thinking: what the chat template takes (tools may be empty).
    target: the assistant's text after the generation prompt, up to <|im_end|>.
    answer: {"kind": name of a checker, ...}; see checks.py.
    """

    skill: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    enable_thinking: bool
    target: str
    answer: dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """One question and its answer, before the conversation around it is chosen.

    plan: what stands in the think block: the working, or one line about what is asked.
    show_plan: with thinking off the plan opens the reply, because a reply without it is too hard.
    earlier: a (question, reply) that the question refers back to, or None.
    later: messages between the question and the reply: a tool call and its result.
    system: the system message that the question needs, or None where any will do.
    """

    question: str
    plan: str
    reply: str
    answer: dict[str, Any]
    show_plan: bool = False
    earlier: tuple[str, str] | None = None
    later: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    system: str | None = None


Make = Callable[[Split, random.Random], Draft]


def target_text(draft: Draft, *, enable_thinking: bool) -> str:
    """The assistant's turn: after `<think>\\n` with thinking, after the empty block without."""
    if enable_thinking:
        return draft.plan + THINK_END + draft.reply
    if draft.show_plan:
        return draft.plan + "\n\n" + draft.reply
    return draft.reply
