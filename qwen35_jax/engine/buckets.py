"""The sizes that programs are compiled for: every step fits one of them.

A decode program has R rows. A mixed program has all rows there can be, and N prompt chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Where a program takes seconds to compile and padding costs little beside it.
FEW_ROWS = (1, 16, 256, 1024)
FEW_CHUNKS = (1, 8, 64, 256)


@dataclass(frozen=True)
class Buckets:
    """rows: of decode programs; chunks: of mixed programs. Ascending; the last fits every step."""

    rows: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def make(cls, *, max_rows: int, max_chunks: int, few: bool) -> "Buckets":
        """few: as few sizes as will do, for devices where compiling them takes long."""
        return cls(
            rows=_up_to(max_rows, FEW_ROWS if few else ROWS),
            chunks=_up_to(max_chunks, FEW_CHUNKS if few else CHUNKS),
        )

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    @property
    def max_chunks(self) -> int:
        return self.chunks[-1]

    def rows_for(self, count: int) -> int:
        """The smallest size that holds `count` rows."""
        return _smallest(self.rows, count)

    def chunks_for(self, count: int) -> int:
        return _smallest(self.chunks, count)


def _up_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


def _smallest(sizes: tuple[int, ...], count: int) -> int:
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"no program holds {count}; the largest holds {sizes[-1]}")
