"""Lists and words: sort, reverse, count. The working goes item by item or letter by letter."""

import random
from bisect import bisect

from bench.tiny_model.example import Draft, Split
from bench.tiny_model.splits import operands_fit
from bench.tiny_model.words import CONSONANTS, NOUNS, VOWELS

SORT_NUMBERS_UP = (
    "Sort these numbers: {items}",
    "Sort the numbers {items}.",
    "Sort {items} from smallest to largest.",
    "Sort {items} in ascending order.",
    "Put these numbers in order: {items}",
    "Order these numbers from low to high: {items}",
    "Arrange {items} from smallest to largest.",
    "Please sort: {items}",
    "What is the sorted order of {items}?",
    "Can you sort {items}?",
    "Sort {items}",
    "sort {items}",
)
SORT_NUMBERS_DOWN = (
    "Sort {items} from largest to smallest.",
    "Sort {items} in descending order.",
    "Put these numbers in descending order: {items}",
    "Order these numbers from high to low: {items}",
    "Arrange {items} from largest to smallest.",
    "Please sort, largest first: {items}",
)
SORT_WORDS = (
    "Sort these words: {items}",
    "Sort the words {items}.",
    "Sort {items} alphabetically.",
    "Put these words in alphabetical order: {items}",
    "Sort these words from A to Z: {items}",
    "Arrange {items} in alphabetical order.",
    "Order these words alphabetically: {items}",
    "Please sort alphabetically: {items}",
    "What is the alphabetical order of {items}?",
    "Can you put {items} in alphabetical order?",
)
REVERSE_LIST = (
    "Reverse this list: {items}",
    "Reverse the list {items}.",
    "Reverse the order of {items}.",
    "Turn this list around: {items}",
    "List these items in reverse order: {items}",
    "Write {items} in reverse order.",
    "Give me this list backwards: {items}",
    "Please reverse: {items}",
    "What is {items} in reverse order?",
)
COUNT_ITEMS = (
    "How many items are in this list: {items}?",
    "How many items are there: {items}?",
    "Count the items: {items}",
    "Count the items in this list: {items}",
    "How long is this list: {items}?",
    "How many words are in this list: {items}?",
    "How many things do I list: {items}?",
    "Please count these: {items}",
    "What is the number of items in {items}?",
)
REVERSE_WORD = (
    'Reverse the word "{word}".',
    "Reverse the word {word}.",
    "Reverse {word}.",
    "Spell {word} backwards.",
    'Spell "{word}" backwards.',
    "Write {word} backwards.",
    'What is "{word}" backwards?',
    "What is {word} spelled backwards?",
    "Turn the word {word} around, letter by letter.",
    "Please write the word {word} in reverse.",
    'Give me the letters of "{word}" in reverse order.',
)
COUNT_LETTER = (
    'How many times does the letter "{letter}" appear in "{word}"?',
    "How many times does the letter {letter} appear in {word}?",
    "How often does {letter} occur in {word}?",
    'How often is the letter {letter} in the word "{word}"?',
    "How many {letter}'s are in {word}?",
    "How many {letter}'s are in the word {word}?",
    "Count the letter {letter} in {word}.",
    'Count the {letter}\'s in "{word}".',
    "How many of the letters of {word} are {letter}?",
    "Tell me how many {letter}'s {word} has.",
)
WORD_LENGTH = (
    "How many letters does {word} have?",
    'How many letters does the word "{word}" have?',
    "How many letters are in {word}?",
    "How many letters are in the word {word}?",
    "Count the letters of {word}.",
    'Count the letters in "{word}".',
    "How long is the word {word}?",
    "What is the length of the word {word}?",
    "What is the number of letters in {word}?",
    "Tell me how many letters {word} has.",
)
SHORTEST_LIST, LONGEST_LIST = 3, 7
LARGEST_NUMBER = 99
DOWN_SHARE = 0.3
MADE_UP_SHARE = 0.4
ABSENT_LETTER_SHARE = 0.15
SPACES_SHARE = 0.15  # of the lists of numbers are written without commas


def insertion_working[Item: (int, str)](items: list[Item], *, down: bool) -> str:
    """Insertion sort, a line an item: `take 12: 12 35`."""
    ordered: list[Item] = []
    lines = []
    for item in items:
        ordered.insert(bisect(ordered, item), item)
        shown = reversed(ordered) if down else ordered
        lines.append(f"take {item}: {' '.join(map(str, shown))}")
    return "\n".join(lines)


def sort_numbers_draft(split: Split, random_source: random.Random) -> Draft:
    """Different whole numbers, smallest or largest first."""
    while True:
        items = random_source.sample(range(1, LARGEST_NUMBER + 1), _length(random_source))
        if operands_fit(split, "sort", *sorted(items)):
            break
    down = random_source.random() < DOWN_SHARE
    phrasings = SORT_NUMBERS_DOWN if down else SORT_NUMBERS_UP
    return _list_draft(
        question=random_source.choice(phrasings),
        items=[str(item) for item in items],
        plan=insertion_working(items, down=down),
        result=[str(item) for item in sorted(items, reverse=down)],
        label="Sorted",
        show_plan=True,
        separator=" " if random_source.random() < SPACES_SHARE else ", ",
    )


def sort_words_draft(split: Split, random_source: random.Random) -> Draft:
    """Words with different first letters, from A to Z."""
    while True:
        items = _words(random_source, different_initials=True)
        if operands_fit(split, "sort", *sorted(items)):
            break
    return _list_draft(
        question=random_source.choice(SORT_WORDS),
        items=items,
        plan=insertion_working(items, down=False),
        result=sorted(items),
        label="Sorted",
        show_plan=True,
    )


def reverse_list_draft(split: Split, random_source: random.Random) -> Draft:
    """A list of words or numbers, last first."""
    while True:
        if random_source.random() < 0.5:
            items = _words(random_source)
        else:
            count = _length(random_source)
            items = [str(random_source.randint(1, LARGEST_NUMBER)) for _ in range(count)]
        if operands_fit(split, "reverse", *sorted(items)) and items != items[::-1]:
            break
    return _list_draft(
        question=random_source.choice(REVERSE_LIST),
        items=items,
        plan="The last item comes first.",
        result=items[::-1],
        label="Reversed",
    )


def count_items_draft(split: Split, random_source: random.Random) -> Draft:
    """How many words a list has."""
    while True:
        items = _words(random_source)
        if operands_fit(split, "count", *sorted(items)):
            break
    return Draft(
        question=random_source.choice(COUNT_ITEMS).format(items=", ".join(items)),
        plan=" ".join(f"{item} {number}" for number, item in enumerate(items, 1)),
        reply=f"The list has {len(items)} items.",
        answer={"kind": "number", "value": len(items)},
        show_plan=True,
    )


def reverse_word_draft(split: Split, random_source: random.Random) -> Draft:
    """A word's letters, last first.

    The answer is in capitals, which the tokenizer never merges: a letter is a token.
    """
    word = _word(split, "reverse", random_source)
    return Draft(
        question=random_source.choice(REVERSE_WORD).format(word=word),
        plan=f"letters: {' '.join(word)}\nbackwards: {' '.join(reversed(word))}",
        reply=f"Backwards it is {word[::-1].upper()}.",
        answer={"kind": "letters", "value": word[::-1]},
        show_plan=True,
    )


def count_letter_draft(split: Split, random_source: random.Random) -> Draft:
    """How often a letter occurs, with a running count after every letter."""
    word = _word(split, "letter", random_source)
    letters = "abcdefghijklmnopqrstuvwxyz"
    absent = random_source.random() < ABSENT_LETTER_SHARE
    letter = random_source.choice(letters if absent else word)
    counts = [word[: place + 1].count(letter) for place in range(len(word))]
    times = f"{counts[-1]} time" + ("" if counts[-1] == 1 else "s")
    return Draft(
        question=random_source.choice(COUNT_LETTER).format(letter=letter, word=word),
        plan=" ".join(f"{spelled}{count}" for spelled, count in zip(word, counts, strict=True)),
        reply=f"The letter {letter} appears {times} in {word}.",
        answer={"kind": "number", "value": counts[-1]},
        show_plan=True,
    )


def word_length_draft(split: Split, random_source: random.Random) -> Draft:
    """How many letters a word has, with the letters numbered."""
    word = _word(split, "length", random_source)
    return Draft(
        question=random_source.choice(WORD_LENGTH).format(word=word),
        plan=" ".join(f"{letter}{number}" for number, letter in enumerate(word, 1)),
        reply=f"The word {word} has {len(word)} letters.",
        answer={"kind": "number", "value": len(word)},
        show_plan=True,
    )


def _list_draft(
    *,
    question: str,
    items: list[str],
    plan: str,
    result: list[str],
    label: str,
    show_plan: bool = False,
    separator: str = ", ",
) -> Draft:
    return Draft(
        question=question.format(items=separator.join(items)),
        plan=plan,
        reply=f"{label}: {', '.join(result)}",
        answer={"kind": "items", "value": result},
        show_plan=show_plan,
    )


def _length(random_source: random.Random) -> int:
    return random_source.randint(SHORTEST_LIST, LONGEST_LIST)


def _words(random_source: random.Random, *, different_initials: bool = False) -> list[str]:
    count = _length(random_source)
    while True:
        words: list[str] = random_source.sample(NOUNS, count)
        if not different_initials or len({word[0] for word in words}) == count:
            return words


def _word(split: Split, skill: str, random_source: random.Random) -> str:
    """A word that the split may spell for this skill: a noun, or made up of syllables."""
    while True:
        if random_source.random() < MADE_UP_SHARE:
            syllables = random_source.randint(2, 3)
            word = "".join(
                random_source.choice(CONSONANTS) + random_source.choice(VOWELS)
                for _ in range(syllables)
            ) + random_source.choice(["", *CONSONANTS])
        else:
            word = random_source.choice(NOUNS)
        if operands_fit(split, skill, word):
            return word
