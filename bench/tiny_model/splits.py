"""Which examples training never sees: decided by a hash of what is asked, not by chance.

Facts split by fact and phrasing: training asks for every fact in most phrasings, and held-out
examples ask for it in the others. What has operands splits by operands: held-out ones never stand
together in training.
"""

import hashlib
from collections.abc import Sequence
from functools import cache

from bench.tiny_model.example import Split

HELD_OUT_OPERANDS = 10  # one in so many
HELD_OUT_PHRASINGS = 6  # one in so many, at least one


def operands_fit(split: Split, *operands: object) -> bool:
    """Whether these operands belong to the split."""
    return (_hash(operands) % HELD_OUT_OPERANDS == 0) == (split == "held_out")


def pair_fits(split: Split, first: int, second: int) -> bool:
    """Whether two numbers, in either order, belong to the split: the same for all skills."""
    return operands_fit(split, "pair", min(first, second), max(first, second))


def phrasings_of[Phrasing](
    split: Split, fact: Sequence[object], phrasings: tuple[Phrasing, ...]
) -> tuple[Phrasing, ...]:
    """The phrasings in which the split asks for the fact (at least two phrasings in all)."""
    held_out = _held_out_places(tuple(fact), len(phrasings))
    keep = split == "held_out"
    return tuple(
        phrasing for place, phrasing in enumerate(phrasings) if (place in held_out) == keep
    )


@cache
def _held_out_places(fact: tuple[object, ...], count: int) -> frozenset[int]:
    places = sorted(range(count), key=lambda place: _hash((*fact, place)))
    return frozenset(places[: max(1, count // HELD_OUT_PHRASINGS)])


def _hash(key: tuple[object, ...]) -> int:
    # Not hash(), which is salted anew in every process.
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest())
