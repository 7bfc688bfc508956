"""From a model's name to its directory. The hub is stood in for: no test touches the network."""

import builtins
import fnmatch
import os
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from qwen35_jax.errors import CheckpointError
from qwen35_jax.hub import resolve_model


class Hub:
    """Stands in for snapshot_download: records the calls, gives a directory or raises."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failure: Exception | None = None

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.calls.append((repo_id, options))
        if self.failure is not None:
            raise self.failure
        return str(self.directory)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return hub


def test_an_existing_directory_is_returned_as_it_is(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    assert resolve_model(directory) == directory
    assert resolve_model(str(directory)) == directory
    assert resolve_model("model") == Path("model")
    assert hub.calls == []


def test_a_directory_goes_before_a_hub_id_of_the_same_spelling(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == Path("owner/name")
    assert hub.calls == []


def test_home_is_expanded(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"


def test_a_local_directory_does_not_import_the_hub_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def guarded(name: str, *rest: Any, **options: Any) -> Any:
        assert not name.startswith("huggingface_hub")
        return real_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert resolve_model(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/model",
        "./model",
        "../no-such-model",
        "~/no-such-model",
        "a/b/c",
        "owner/name/",
        pytest.param(Path("owner/name"), id="path-object"),
    ],
)
def test_a_missing_path_is_never_asked_of_the_hub(hub: Hub, name: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"^directory .* does not exist$") as raised:
        resolve_model(name)
    assert os.fspath(name) in str(raised.value)
    assert hub.calls == []


@pytest.mark.parametrize(
    "name", ["model", "owner name/model", "owner/.hidden", "owner/a..b", "owner/a--b", "a/b\n"]
)
def test_what_is_neither_path_nor_hub_id_is_refused(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a directory here nor a hub id"):
        resolve_model(name)
    assert hub.calls == []


def test_an_empty_name_is_refused(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve_model("")


def test_a_null_character_in_a_name_is_refused(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="neither a directory"):
        resolve_model("a\0b")


def test_a_file_is_refused(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file; give the directory"):
        resolve_model("model.safetensors")


def test_a_revision_of_a_local_directory_is_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="revision 'v2' is for hub ids"):
        resolve_model(tmp_path, revision="v2")


def test_a_hub_id_is_fetched_at_its_revision(hub: Hub) -> None:
    assert resolve_model("Qwen/Qwen3.5-4B", revision="v2") == hub.directory
    repo_id, options = hub.calls[0]
    assert (repo_id, options["revision"]) == ("Qwen/Qwen3.5-4B", "v2")


def test_only_the_files_the_engine_reads_are_fetched(hub: Hub) -> None:
    resolve_model("Qwen/Qwen3.5-4B")
    patterns = hub.calls[0][1]["allow_patterns"]

    def fetched(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model.safetensors-00001-of-00002.safetensors",
    ]
    assert [name for name in wanted if not fetched(name)] == []
    unwanted = ["pytorch_model.bin", "README.md", "model.gguf", "vocab.json", "figure.png"]
    assert [name for name in unwanted if fetched(name)] == []


def _response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.invalid/api"))


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (errors.GatedRepoError("no", response=_response(403)), "accept its licence"),
        (errors.RepositoryNotFoundError("no", response=_response(404)), "check the spelling"),
        (errors.RevisionNotFoundError("no", response=_response(404)), "no revision 'v2'"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (errors.LocalEntryNotFoundError("no\nnetwork"), "check the connection"),
        (errors.HfHubHTTPError("503\nbusy", response=_response(503)), "503 busy; try again"),
        (httpx2.ProxyError("proxy says no"), "proxy says no; try again"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError(), "RuntimeError; try again"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_failure_of_the_hub_is_one_line_with_advice(
    hub: Hub, failure: Exception, advice: str
) -> None:
    hub.failure = failure
    with pytest.raises(CheckpointError) as raised:
        resolve_model("owner/name", revision="v2")
    message = str(raised.value)
    assert message.startswith("owner/name ")
    assert advice in message
    assert "\n" not in message


def test_an_interrupt_while_fetching_is_not_swallowed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("owner/name")
