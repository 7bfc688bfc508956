"""A profile becomes a table: time by operation, launches a step, overlaps counted once."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import step_trace
from bench.step_trace import (
    TraceError,
    captured,
    check_trace_folder,
    keep_graphs_while_profiling,
    kind_of,
    read_trace,
    trace_lines,
    trace_table,
)
from qwen35_jax.errors import ConfigError


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
    {"ph": "M", "pid": 1, "name": "process_sort_index", "args": {"sort_index": 1}},
    named("process_name", 2, "/host:CPU"),
    named("thread_name", 2, "python", 5),
    complete(1, 13, "gemm_fusion_dot_7", 10, 30),
    complete(1, 13, "gemm_fusion_dot_7", 110, 50),
    complete(1, 13, "gemm_fusion_dot.9_2", 165, 10),
    complete(1, 13, "norm", 40, 4),
    complete(1, 14, "copy", 30, 20),
    complete(1, 99, "jit_run_step", 10, 150),
    complete(2, 5, "cuGraphLaunch", 0, 9),
    complete(2, 5, "cuGraphLaunch", 90, 9),
    complete(2, 5, "cuLaunchKernel", 90, 1),
    complete(2, 5, "command_buffer::update#commands=9#", 0, 5),
    complete(2, 5, "something else", 0, 5),
    complete(2, 5, "customs", 0, 5),
]


def test_a_profile_is_summed_by_step():
    found = trace_table(EVENTS, steps=2)
    # 30 + 50 + 10 + 4 + 20, of which 10 to 50, 110 to 160 and 165 to 175 are covered.
    assert (found["device_us"], found["busy_us"], found["span_us"]) == (57.0, 50.0, 82.5)
    assert (found["steps"], found["kernels"], found["whole"]) == (2, 2.5, True)
    assert found["launches"] == {
        "cuGraphLaunch": 1.0,
        "command_buffer::update": 0.5,
        "command_buffer::execute": 0.0,
    }
    assert found["host_calls"] == {
        "cuGraphLaunch": 1.0,
        "cuLaunchKernel": 0.5,
        "command_buffer::update": 0.5,
    }


def test_operations_are_counted_by_kind_and_by_name():
    found = trace_table(EVENTS, steps=2)
    assert found["ops"] == [
        {"name": "gemm_fusion_dot", "names": 2, "calls": 1.5, "us": 45.0, "total_us": 90.0},
        {"name": "copy", "names": 1, "calls": 0.5, "us": 10.0, "total_us": 20.0},
        {"name": "norm", "names": 1, "calls": 0.5, "us": 2.0, "total_us": 4.0},
    ]
    assert [(one["name"], one["us"]) for one in found["single_ops"]] == [
        ("gemm_fusion_dot_7", 40.0),
        ("copy", 10.0),
        ("gemm_fusion_dot.9_2", 5.0),
        ("norm", 2.0),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemm_fusion_dot_12_0", "gemm_fusion_dot"),
        ("loop_add_fusion", "loop_add_fusion"),
        ("dot.33", "dot"),
        ("sm90_xmma_gemm_128x64", "sm90_xmma_gemm_128x64"),
        ("_1", "_1"),
    ],
)
def test_a_kind_has_no_instance_numbers(name: str, kind: str):
    assert kind_of(name) == kind


def test_a_cpus_operations_are_the_host_events_that_name_one():
    events = [
        named("process_name", 2, "/host:CPU"),
        complete(2, 5, "dot.3", 0, 30) | {"args": {"hlo_op": "dot.3"}},
        complete(2, 5, "wait", 0, 99),
    ]
    found = trace_table(events, steps=1)
    assert [one["name"] for one in found["ops"]] == ["dot"]
    assert found["device_us"] == 30.0


def test_a_profile_that_the_profiler_cut_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_trace, "MAX_EVENTS", len(EVENTS))
    assert trace_table(EVENTS, steps=2)["whole"] is False


def test_the_lines_for_people_hold_shares():
    lines = trace_lines(trace_table(EVENTS, steps=2), most=1)
    assert lines[-1] == "| gemm_fusion_dot | 2 | 1.5 | 45.0 | 78.9% |"
    assert "2.5 operations a step in 57 us" in lines[0]
    assert "1 cuGraphLaunch, 0.5 command_buffer::update" in lines[0]


def test_a_profile_is_read_from_its_file(tmp_path: Path):
    path = tmp_path / "one.trace.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": EVENTS}, file)
    assert read_trace(path, steps=2) == trace_table(EVENTS, steps=2)


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"{"), gzip.compress(b"{}")])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "one.trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"one\.trace\.json\.gz is no profile"):
        read_trace(path, steps=1)


def test_a_profile_without_operations_is_refused():
    with pytest.raises(TraceError, match="holds no operations"):
        trace_table(EVENTS[:7], steps=1)


def test_what_jax_profiles_can_be_read(tmp_path: Path):
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: jnp.tanh(x @ x))
    numbers = jnp.ones((64, 64))
    multiply(numbers).block_until_ready()
    with captured(tmp_path, "multiply") as path:
        for _ in range(3):
            multiply(numbers).block_until_ready()
    found = read_trace(path, steps=3)
    assert path == tmp_path / "multiply.trace.json.gz"
    assert found["device_us"] > 0
    assert all(one["calls"] == 1 for one in found["single_ops"])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--trace .*file.* can't be written"):
        check_trace_folder(tmp_path / "file" / "inner")


@pytest.mark.parametrize(
    ("before", "loaded", "kept", "after"),
    [
        (None, False, True, f"{step_trace.GRAPHS_FLAG}=true"),
        ("--one", False, True, f"--one {step_trace.GRAPHS_FLAG}=true"),
        (None, True, False, None),
        (f"{step_trace.GRAPHS_FLAG}=false --one", False, False, "unchanged"),
        (f"{step_trace.GRAPHS_FLAG}=true", True, True, "unchanged"),
        (step_trace.GRAPHS_FLAG, False, True, "unchanged"),
    ],
)
def test_graphs_stay_on_while_profiling_where_that_can_be_had(
    before: str | None,
    loaded: bool,
    kept: bool,
    after: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    if before is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", before)
    monkeypatch.setattr(sys, "modules", {"jax": None} if loaded else {})
    assert keep_graphs_while_profiling() is kept
    assert os.environ.get("XLA_FLAGS") == (before if after == "unchanged" else after)
    monkeypatch.setenv("XLA_FLAGS", "")
