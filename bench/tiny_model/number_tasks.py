"""Sums and differences, with the working digit by digit, ones first.

Each line of the working needs only the line before it and two digits of the question: that is
what a model of a few million parameters can learn to do for numbers it has never seen.
"""

import random

from bench.tiny_model.example import Draft, Split
from bench.tiny_model.splits import pair_fits

COLUMNS = ("ones", "tens", "hundreds")
# (digits of the first, digits of the second number): how often.
SIZES = {(1, 1): 6, (1, 2): 4, (2, 1): 4, (2, 2): 44, (2, 3): 10, (3, 2): 10, (3, 3): 32}
SUM_PHRASINGS = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a} + {b}",
    "{a}+{b}",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "What's the sum of {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "What do {a} and {b} make together?",
    "Work out {a} + {b}, please.",
    "Please add {b} to {a}.",
    "I have {a} apples and get {b} more. How many do I have now?",
    "There are {a} people in a hall and {b} more come in. How many people are there?",
)
DIFFERENCE_PHRASINGS = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a} - {b}",
    "{a}-{b}",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "Work out {a} - {b}, please.",
    "Take {b} away from {a}.",
)
# These make sense only where the result isn't negative.
STORY_DIFFERENCE_PHRASINGS = (
    "I have {a} apples and give away {b}. How many are left?",
    "There are {a} people in a hall and {b} leave. How many people are left?",
    "What is the difference between {a} and {b}?",
    "How much is left when I take {b} from {a}?",
)
FOLLOW_UPS = (
    "And {question}?",
    "What about {question}?",
    "Now {question}.",
    "And what is {question}?",
)
FOLLOW_UP_SHARE = 0.08
NEGATIVE_SHARE = 0.15


def sum_working(first: int, second: int) -> str:
    """Column by column, ones first: `7+5+0=12, write 2, carry 1`."""
    lines, written, carry = [], "", 0
    for place in range(max(len(str(first)), len(str(second)))):
        a, b = _digit(first, place), _digit(second, place)
        total = a + b + carry
        digit = total % 10
        lines.append(
            f"{COLUMNS[place]}: {a}+{b}+{carry}={total}, write {digit}, carry {total // 10}"
        )
        carry = total // 10
        written = str(digit) + written
    if carry:
        lines.append("carry 1 in front")
    return "\n".join([*lines, f"result: {'1' if carry else ''}{written}"])


def difference_working(first: int, second: int) -> str:
    """Which one is larger, then column by column with borrows: `12-5-0=7, write 7, borrow 1`."""
    negative = first < second
    large, small = max(first, second), min(first, second)
    sign = "<" if negative else "=" if first == second else ">"
    lines = [f"{first}{sign}{second}, so {large}-{small}{', negative' if negative else ''}"]
    written, borrow = "", 0
    for place in range(len(str(large))):
        a, b = _digit(large, place), _digit(small, place)
        new_borrow = int(a - b - borrow < 0)
        digit = a + 10 * new_borrow - b - borrow
        lines.append(
            f"{COLUMNS[place]}: {a + 10 * new_borrow}-{b}-{borrow}={digit}, "
            f"write {digit}, borrow {new_borrow}"
        )
        borrow = new_borrow
        written = str(digit) + written
    # The leading zeros go only here: the columns are then all alike.
    return "\n".join([*lines, f"written: {written}", f"result: {first - second}"])


def sum_draft(split: Split, random_source: random.Random) -> Draft:
    """A sum of two numbers of one to three digits."""
    first, second = _pair(split, random_source)
    question = random_source.choice(SUM_PHRASINGS).format(a=first, b=second)
    earlier = None
    if random_source.random() < FOLLOW_UP_SHARE:
        a, b = _pair("train", random_source)
        earlier = (f"What is {a} + {b}?", f"{a} + {b} = {a + b}.")
        question = random_source.choice(FOLLOW_UPS).format(question=f"{first} + {second}")
    return Draft(
        question=question,
        plan=sum_working(first, second),
        reply=f"{first} + {second} = {first + second}.",
        answer={"kind": "number", "value": first + second, "operands": [first, second]},
        show_plan=max(first, second) > 9,
        earlier=earlier,
    )


def difference_draft(split: Split, random_source: random.Random) -> Draft:
    """A difference of two numbers of one to three digits, at times negative."""
    first, second = _pair(split, random_source)
    if (first < second) != (random_source.random() < NEGATIVE_SHARE):
        first, second = second, first
    stories = STORY_DIFFERENCE_PHRASINGS if first >= second else ()
    question = random_source.choice(DIFFERENCE_PHRASINGS + stories).format(a=first, b=second)
    earlier = None
    if random_source.random() < FOLLOW_UP_SHARE:
        b, a = sorted(_pair("train", random_source))
        earlier = (f"What is {a} - {b}?", f"{a} - {b} = {a - b}.")
        question = random_source.choice(FOLLOW_UPS).format(question=f"{first} - {second}")
    return Draft(
        question=question,
        plan=difference_working(first, second),
        reply=f"{first} - {second} = {first - second}.",
        answer={"kind": "number", "value": first - second, "operands": [first, second]},
        show_plan=max(first, second) > 9,
        earlier=earlier,
    )


def random_pair(
    split: Split, random_source: random.Random, sizes: dict[tuple[int, int], int]
) -> tuple[int, int]:
    """Two numbers of the split; sizes: (digits, digits) and how often."""
    shapes, weights = list(sizes), list(sizes.values())
    while True:
        shape = random_source.choices(shapes, weights)[0]
        first, second = (
            random_source.randrange(10 ** (size - 1) if size > 1 else 0, 10**size) for size in shape
        )
        if pair_fits(split, first, second):
            return first, second


def _pair(split: Split, random_source: random.Random) -> tuple[int, int]:
    return random_pair(split, random_source, SIZES)


def _digit(number: int, place: int) -> int:
    return number // 10**place % 10
