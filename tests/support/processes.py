"""Other processes: who their children are, and whether they are still there. On Linux only."""

import time
from collections.abc import Callable
from pathlib import Path

WAIT_SECONDS = 60


def children_of(process_id: int) -> list[int]:
    """Those that any of its threads has started."""
    lists = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for names in lists for child in names.read_text().split()]


def is_alive(process_id: int) -> bool:
    """A process that has ended and that nobody has asked about yet is not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(") ")[2][0] not in "ZX"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
