"""What every benchmark run leaves behind."""

import datetime
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from bench import results_file
from bench.results_file import write_results


def written(directory: Path, **options: Any) -> dict[str, Any]:
    path = directory / "new" / "folder" / "run.json"
    fields: dict[str, Any] = {
        "name": "load",
        "command": "python -m bench.load MODEL",
        "model": {"path": "tiny", "parameters": 3},
        "flags": {"repeats": 2},
        "rows": [{"load": 1, "seconds": 0.5}, {"load": 2, "seconds": None}],
    }
    write_results(path, **fields | options)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    return json.loads(text)


def test_the_file_says_what_ran_where_and_on_what(tmp_path: Path):
    content = written(tmp_path, commit="abc")
    assert list(content) == [
        *("name", "command", "commit", "date", "device", "driver", "versions", "model", "flags"),
        "rows",
    ]
    assert content["commit"] == "abc"
    assert content["device"] == jax.devices()[0].device_kind
    assert content["model"] == {"path": "tiny", "parameters": 3}
    assert content["flags"] == {"repeats": 2}
    assert content["rows"] == [{"load": 1, "seconds": 0.5}, {"load": 2, "seconds": None}]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    today = datetime.datetime.now(datetime.UTC).date()
    assert 0 <= (today - datetime.date.fromisoformat(content["date"])).days <= 1


def test_versions_are_the_installed_ones_and_null_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(results_file, "PACKAGES", ("jax", "no-such-package"))
    versions = written(tmp_path)["versions"]
    assert versions.pop("python").startswith("3.")
    assert versions == {"jax": jax.__version__, "no-such-package": None}


def test_without_git_and_without_a_driver_there_are_nulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def missing(command: list[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", missing)
    content = written(tmp_path)
    assert (content["commit"], content["driver"]) == (None, None)


def test_a_failing_command_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert written(tmp_path)["commit"] is None


def test_the_commit_and_the_driver_are_first_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, f"of {command[0]} \nsecond line\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    content = written(tmp_path)
    assert (content["commit"], content["driver"]) == ("of git", "of nvidia-smi")


def test_ceilings_and_further_fields_stand_where_readers_look_for_them(tmp_path: Path):
    content = written(tmp_path, ceilings={"read_gb_per_s": 4305.0}, more={"start": {"seconds": 3}})
    assert [*content][-3:] == ["ceilings", "rows", "start"]
    assert content["ceilings"] == {"read_gb_per_s": 4305.0}
    assert content["start"] == {"seconds": 3}


def test_facts_that_are_known_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = results_file.run_facts("abc")
    monkeypatch.setattr(results_file, "run_facts", None)
    assert written(tmp_path, facts=facts) | facts == written(tmp_path, facts=facts)


def test_a_write_that_breaks_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "new" / "folder" / "run.json"
    before = written(tmp_path)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            written(tmp_path, rows=[])
    assert json.loads(path.read_text(encoding="utf-8")) == before
    written(tmp_path, rows=[])
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    # A daemon, or a failing test would wait for it forever.
    reader = threading.Thread(
        target=lambda: read.append(pipe.read_text(encoding="utf-8")), daemon=True
    )
    reader.start()
    write_results(pipe, name="x", command="x", model={}, flags={}, rows=[])
    reader.join(10)
    assert json.loads(read[0])["name"] == "x"
    assert pipe.is_fifo()
