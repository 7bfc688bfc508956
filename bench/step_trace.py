"""A profile of decode steps as a table: time by operation, and how steps reach the device."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A step whose kernels are one CUDA graph shows one of each.
HOST_EVENTS = ("cuGraphLaunch", "command_buffer::execute", "command_buffer::update")


@dataclass(frozen=True)
class Operation:
    """One kernel's calls and device microseconds, of a step."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True)
class StepTrace:
    """operations: the costliest first. host_events: how often each of HOST_EVENTS came, a step.
    busy_us: device microseconds of a step with a kernel running."""

    operations: list[Operation]
    host_events: dict[str, float]
    busy_us: float

    def as_json(self, most: int = 40) -> dict[str, Any]:
        return {
            "busy_us": round(self.busy_us, 1),
            "kernels": round(sum(one.calls for one in self.operations), 1),
            "host_events": {name: round(count, 2) for name, count in self.host_events.items()},
            "operations": [
                {"name": one.name, "calls": round(one.calls, 2), "us": round(one.microseconds, 2)}
                for one in self.operations[:most]
            ],
        }


def read_trace(directory: Path, steps: int) -> StepTrace:
    """Of what jax.profiler.trace left in `directory`. Raises FileNotFoundError."""
    files = sorted(directory.rglob("*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no trace: the profiler wrote nothing")
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        return summarise(json.load(file)["traceEvents"], steps)


def summarise(events: Iterable[Mapping[str, Any]], steps: int) -> StepTrace:
    """events: of the Trace Event format; device events are in processes named /device:GPU:n, on
    threads named after their stream."""
    events = list(events)
    device = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event["args"]["name"]
    }
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name"
        and event["pid"] in device
        and event["args"]["name"].startswith("Stream")
    }
    calls: dict[str, int] = {}
    microseconds: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    host = dict.fromkeys(HOST_EVENTS, 0)
    for event in events:
        if event.get("ph") != "X":
            continue
        name, duration = event["name"], float(event.get("dur", 0.0))
        if (event["pid"], event["tid"]) in streams:
            calls[name] = calls.get(name, 0) + 1
            microseconds[name] = microseconds.get(name, 0.0) + duration
            spans.append((float(event["ts"]), float(event["ts"]) + duration))
        elif event["pid"] not in device:
            for known in HOST_EVENTS:
                host[known] += name.startswith(known)
    operations = [
        Operation(name, calls[name] / steps, microseconds[name] / steps) for name in calls
    ]
    return StepTrace(
        operations=sorted(operations, key=lambda one: -one.microseconds),
        host_events={name: count / steps for name, count in host.items()},
        busy_us=_covered(spans) / steps,
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of the intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
