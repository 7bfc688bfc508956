"""From what the user calls a model to a directory on this machine: a path, or a hub id to fetch."""

import os
import re
from pathlib import Path

from qwen35_jax.errors import CheckpointError

# Weights in other formats, images and model cards stay on the hub.
FILE_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)

_HUB_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(f"{_HUB_NAME}/{_HUB_NAME}")


def resolve_model(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The directory of a model.

    model: a directory, used as it is and without the network; or a hub id `owner/name`, fetched
        into huggingface_hub's cache unless it is there. A directory goes before a hub id of the
        same spelling.
    revision: a branch, tag or commit of a hub id; None is its main branch.

    Raises CheckpointError, one line that says what to do, when there is no such directory or the
    hub doesn't give the model.
    """
    name = os.fspath(model)
    path = Path(os.path.expanduser(name))
    if _is_directory(path, name):
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} is for hub ids, but {name} is a local directory; "
                "leave the revision out"
            )
        return path
    if not isinstance(model, str) or _looks_like_path(name):
        raise CheckpointError(f"directory {name} does not exist")
    if not _HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        raise CheckpointError(
            f"{name!r} is neither a directory here nor a hub id of the form owner/name"
        )
    return _fetch(name, revision)


def _is_directory(path: Path, name: str) -> bool:
    if not name:
        raise CheckpointError("the model's name is empty; give a directory or a hub id owner/name")
    try:
        # Not exists(): it takes a directory that we may not search for one that is missing.
        path.stat()
    except PermissionError as error:
        raise CheckpointError(f"{name} can't be read: {error.strerror}") from None
    except (OSError, ValueError):
        return False
    if not path.is_dir():
        raise CheckpointError(
            f"{name} is a file; give the directory that holds config.json and the weights"
        )
    return True


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or name.count("/") > 1


def _fetch(hub_id: str, revision: str | None) -> Path:
    # Imported here: it takes a third of a second, and a local directory doesn't need it.
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(hub_id, revision=revision, allow_patterns=list(FILE_PATTERNS))
    # The library's failures (HTTP, connection, disk, its own) have no base class but this one.
    except Exception as error:
        raise CheckpointError(_explain(error, hub_id, revision)) from error
    return Path(directory)


def _explain(error: Exception, hub_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    # GatedRepoError is a RepositoryNotFoundError, and LocalEntryNotFoundError an OSError: the
    # special ones come first.
    match error:
        case errors.GatedRepoError():
            return (
                f"{hub_id} is gated: accept its licence on its hub page, then log in with "
                "`hf auth login` or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return f"{hub_id} has no revision {revision!r}; check the branch, tag or commit"
        case errors.RepositoryNotFoundError():
            return (
                f"{hub_id} is not on the hub, or it is private; check the spelling, or log in with "
                "`hf auth login` or set HF_TOKEN"
            )
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            return (
                f"{hub_id} is no directory here, as a hub id it is not in the local cache, and the "
                "hub can't be reached; check the connection and HF_HUB_OFFLINE, or the spelling"
            )
        case errors.IncompleteSnapshotError():
            return (
                f"{hub_id} is only partly in the local cache and the hub can't be reached; "
                "connect to the network and start again to fetch the rest"
            )
        case _:
            reason = " ".join(str(error).split()) or type(error).__name__
            return (
                f"{hub_id} can't be fetched from the hub: {reason}; try again (files already here "
                "are kept), or give a local directory"
            )
