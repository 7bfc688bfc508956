"""A JAX profile of a few steps as a table: what ran on the device, how often, how long.

    with captured(folder, "batch-16") as path:
        ... run 20 steps ...
    table = read_trace(path, steps=20)

The profile is in Chrome's trace format. A GPU's kernels are events of the process "/device:GPU:n"
in threads "Stream #n", those of a CUDA graph one by one; launches and XLA's command buffers, its
name for such graphs, are events of host threads. A CPU's operations stand in host threads and name
their hlo_op.
"""

import gzip
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qwen35_jax.errors import ConfigError

GRAPHS_FLAG = "--xla_enable_command_buffers_during_profiling"
LAUNCHES = ("cuGraphLaunch", "command_buffer::update", "command_buffer::execute")
# The profiler leaves out what comes after.
MAX_EVENTS = 1_000_000
SINGLE_OPERATIONS = 60

Event = dict[str, Any]


class MeasurementError(Exception):
    """The device or a tool failed in the middle of a run."""


class TraceError(MeasurementError):
    """A profile that can't be read, or that holds no steps."""


def keep_graphs_while_profiling() -> bool:
    """Have XLA use CUDA graphs under the profiler too: without them it is of another step.

    Must come before JAX is imported. False where it is too late, or XLA_FLAGS says otherwise.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    given = re.search(rf"{GRAPHS_FLAG}(?:=(\S+))?", flags)
    if given:
        return (given.group(1) or "true").lower() in ("true", "1")
    if "jax" in sys.modules:
        return False
    os.environ["XLA_FLAGS"] = f"{flags} {GRAPHS_FLAG}=true".strip()
    return True


def check_trace_folder(folder: Path) -> None:
    """Make it. Raises ConfigError where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--trace {folder} can't be written: {error.strerror}") from None


@contextmanager
def captured(folder: Path, name: str) -> Iterator[Path]:
    """Profile what runs inside; gives the path of the profile-to-be, which Perfetto opens too.

    Raises TraceError where the profiler writes none.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    # Python's own calls would fill the profile and slow the steps.
    options.python_tracer_level = 0
    path = folder / f"{name}.trace.json.gz"
    with tempfile.TemporaryDirectory(prefix="trace-") as scratch:
        with jax.profiler.trace(scratch, profiler_options=options):
            yield path
        written = sorted(Path(scratch).rglob("*.trace.json.gz"))
        if not written:
            raise TraceError("the profiler wrote no *.trace.json.gz")
        shutil.copyfile(written[-1], path)


def read_trace(path: Path, *, steps: int) -> dict[str, Any]:
    """As trace_table. Raises TraceError for a file that is no profile, too."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no profile: {error!r}") from None
    return trace_table(events, steps=steps)


def trace_table(events: Iterable[Event], *, steps: int) -> dict[str, Any]:
    """What `steps` steps did, by step; times in microseconds.

    device_us: all operations' time. busy_us: time in which at least one ran. span_us: from the
    first one's start to the last one's end. kernels: operations, copies among them. launches: calls
    of LAUNCHES; host_calls: of every function of the CUDA driver and of command buffers. ops: by
    kind, the longest first; names that differ in their numbers only are one kind, of so many names.
    single_ops: the longest by full name. whole: whether the profiler left nothing out.

    Raises TraceError where no operation ran on the device.
    """
    events = list(events)
    device, host = _split(events)
    if not device:
        raise TraceError("the profile holds no operations of the device")
    calls = Counter(_without_arguments(event["name"]) for event in host)
    host_calls = {
        name: _rounded(count / steps)
        for name, count in calls.most_common()
        if re.match(r"command_buffer::|cu[A-Z]", name)
    }
    spans = sorted((event["ts"], event["ts"] + event.get("dur", 0.0)) for event in device)
    return {
        "steps": steps,
        "device_us": _rounded(sum(end - start for start, end in spans) / steps),
        "busy_us": _rounded(_covered(spans) / steps),
        "span_us": _rounded((max(end for _, end in spans) - spans[0][0]) / steps),
        "kernels": _rounded(len(device) / steps),
        "launches": {name: host_calls.get(name, 0.0) for name in LAUNCHES},
        "host_calls": host_calls,
        "ops": _by_name(device, steps, kind_of),
        "single_ops": _by_name(device, steps, str)[:SINGLE_OPERATIONS],
        "whole": len(events) < MAX_EVENTS,
    }


def kind_of(name: str) -> str:
    """An operation's name without the numbers that tell instances apart."""
    return re.sub(r"(?:[._]\d+)+$", "", name) or name


def trace_lines(table: dict[str, Any], most: int = 15) -> list[str]:
    """The table for people, in Markdown."""
    launches = ", ".join(f"{count:g} {name}" for name, count in table["launches"].items())
    lines = [
        f"{table['kernels']:g} operations a step in {table['device_us']:,.0f} us of device time; "
        f"busy {table['busy_us']:,.0f} of {table['span_us']:,.0f} us; {launches}",
        "",
        "| operation | names | calls a step | us a step | share |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['name']} | {one['names']} | {one['calls']:g} | {one['us']:,.1f} "
        f"| {one['us'] / table['device_us'] if table['device_us'] else 0:.1%} |"
        for one in table["ops"][:most]
    ]
    return lines


def _split(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """The device's operations, and the host's events."""
    names: dict[tuple[str, Any, Any], str] = {}
    for event in events:
        if event.get("ph") == "M" and "name" in event.get("args", {}):
            tid = None if event["name"] == "process_name" else event.get("tid")
            names[event["name"], event.get("pid"), tid] = event["args"]["name"]
    device, host, named_ops = [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        pid, tid = event.get("pid"), event.get("tid")
        if names.get(("process_name", pid, None), "").startswith("/device:"):
            # The other threads there sum the streams up by module and by step.
            if names.get(("thread_name", pid, tid), "").startswith("Stream"):
                device.append(event)
            continue
        host.append(event)
        if "hlo_op" in event.get("args", {}):
            named_ops.append(event)
    return device or named_ops, host


def _without_arguments(name: str) -> str:
    """Of a host event, whose arguments may follow its name."""
    return re.split(r"[#({ ]", name, maxsplit=1)[0]


def _by_name(device: list[Event], steps: int, name_of: Callable[[str], str]) -> list[Event]:
    calls: Counter[str] = Counter()
    total: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, set[str]] = defaultdict(set)
    for event in device:
        name = name_of(event["name"])
        calls[name] += 1
        total[name] += event.get("dur", 0.0)
        names[name].add(event["name"])
    return [
        {
            "name": name,
            "names": len(names[name]),
            "calls": _rounded(calls[name] / steps),
            "us": _rounded(microseconds / steps),
            "total_us": _rounded(microseconds),
        }
        for name, microseconds in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union; spans in the order of their starts."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _rounded(value: float) -> float:
    return round(value, 3)
