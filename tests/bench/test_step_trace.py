"""A trace becomes a table: time by operation, launches a step, overlaps counted once."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.step_trace import Operation, read_trace, summarise


def complete(pid: int, tid: int, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": duration}


def named(kind: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


# Two steps: process 1 is the device, with two streams and a line that only groups; 2 is the host.
EVENTS = [
    named("process_name", 1, "/device:GPU:0"),
    named("thread_name", 1, "Stream #13(Compute)", 13),
    named("thread_name", 1, "Stream #14(MemcpyD2H)", 14),
    named("thread_name", 1, "XLA Modules", 99),
    named("process_name", 2, "/host:CPU"),
    named("thread_name", 2, "python", 5),
    complete(1, 13, "gemm", 0, 30),
    complete(1, 13, "gemm", 100, 50),
    complete(1, 13, "norm", 30, 4),
    complete(1, 14, "copy", 20, 20),
    complete(1, 99, "jit_run_step", 0, 150),
    complete(2, 5, "cuGraphLaunch", 0, 9),
    complete(2, 5, "cuGraphLaunch", 90, 9),
    complete(2, 5, "command_buffer::update", 0, 5),
    complete(2, 5, "something else", 0, 5),
]


def test_a_trace_is_summed_by_operation_and_step():
    found = summarise(EVENTS, steps=2)
    assert found.operations == [
        Operation("gemm", 1.0, 40.0),
        Operation("copy", 0.5, 10.0),
        Operation("norm", 0.5, 2.0),
    ]
    assert found.host_events == {
        "cuGraphLaunch": 1.0,
        "command_buffer::execute": 0.0,
        "command_buffer::update": 0.5,
    }
    # 0 to 40 and 100 to 150.
    assert found.busy_us == 45.0


def test_the_newest_file_below_the_directory_is_read(tmp_path: Path):
    inner = tmp_path / "plugins" / "profile" / "run"
    inner.mkdir(parents=True)
    with gzip.open(inner / "host.trace.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": EVENTS}, file)
    content = read_trace(tmp_path, steps=2).as_json(most=1)
    assert content["operations"] == [{"name": "gemm", "calls": 1.0, "us": 40.0}]
    assert content["kernels"] == 2.0


def test_a_profiler_that_wrote_nothing_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        read_trace(tmp_path, steps=1)
