"""The JSON that every benchmark leaves in bench/results: what ran, where, on what, and the rows."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "safetensors", "torch", "transformers", "triton")


def write_results(
    path: Path,
    *,
    name: str,
    command: str,
    model: Mapping[str, Any],
    flags: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    ceilings: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    commit: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write one run, whole or not at all.

    ceilings: what the device was measured to do at most in the same run. more: further fields.
    commit: git's own when None. facts: what run_facts gave, for runs that write more than once.
    """
    content = {
        "name": name,
        "command": command,
        **(run_facts(commit) if facts is None else facts),
        "model": dict(model),
        "flags": dict(flags),
        **({} if ceilings is None else {"ceilings": dict(ceilings)}),
        "rows": [dict(row) for row in rows],
        **(more or {}),
    }
    text = json.dumps(content, indent=2) + "\n"
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe, or a device
        return
    # A run that is killed as it writes leaves what it wrote before.
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def run_facts(commit: str | None = None) -> dict[str, Any]:
    """commit, date, device, driver and versions. `commit` is git's own when None."""
    return {
        "commit": commit or _git_commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **_device(),
        "versions": {package: _version(package) for package in PACKAGES}
        | {"python": platform.python_version()},
    }


def why_not_writable(path: Path) -> str | None:
    """Why results can't be written there, found before the work; None where they can. Makes the
    directory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        return f"{path} can't be written: {error.strerror}"
    return None


def _device() -> dict[str, str | None]:
    import jax

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {"device": jax.devices()[0].device_kind, "driver": _output_of(query)}


def _git_commit() -> str | None:
    return _output_of(["git", "rev-parse", "HEAD"])


def _output_of(command: list[str]) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.splitlines()[0].strip() if finished.stdout else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
