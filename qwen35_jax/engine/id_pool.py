"""Who owns which page of the KV cache, and which slot of the state: pools of ids. No jax here."""

from collections.abc import Sequence


class IdPool:
    """The ids 1 to size - 1, each free or taken. Id 0 is the padding's and never handed out.

    kind: what the ids are of, for messages.
    """

    def __init__(self, kind: str, size: int):
        self._kind = kind
        self._size = size
        # A stack: what was freed last is handed out first, the lowest id of a new pool first.
        self._free = list(range(size - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_ids(self) -> int:
        """Ids that can be handed out, free and taken."""
        return self._size - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._taken)

    def allocate(self, count: int) -> list[int]:
        """Take `count` ids. ValueError, and none taken, where fewer are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} {self._kind}s asked for, {len(self._free)} are free")
        start = len(self._free) - count
        ids = self._free[start:]
        del self._free[start:]
        ids.reverse()
        self._taken.update(ids)
        return ids

    def free(self, ids: Sequence[int]) -> None:
        """Give ids back. ValueError, and none freed, where one is not taken or given twice."""
        given = set(ids)
        if len(given) != len(ids):
            raise ValueError(f"a {self._kind} is given back twice in {list(ids)}")
        if not given <= self._taken:
            raise ValueError(f"{self._kind}s {sorted(given - self._taken)} are not taken")
        self._taken -= given
        self._free.extend(reversed(ids))

    def check_invariants(self) -> None:
        """AssertionError unless every id is free or taken, once, and 0 is neither."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self._kind} is free twice"
        assert not free & self._taken, f"{self._kind}s {free & self._taken} are free and taken"
        assert free | self._taken == set(range(1, self._size)), f"a {self._kind} is lost or foreign"
