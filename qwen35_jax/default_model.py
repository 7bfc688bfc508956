"""The embedded default model: a tiny trained checkpoint that ships inside the package.

Its directory is complete and in the published layout, so that every command, test and notebook runs
at once, without the network, through the same files and the same code as the real model.
`bench/tiny_model` trains it.
"""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from qwen35_jax.errors import CheckpointError

DEFAULT_MODEL_NAME = "qwen3.5-tiny"

_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def default_model_directory() -> Path:
    """The default model's directory in the installed package, which is only ever read.

    Raises CheckpointError where files of it are missing, or are no files of their own.
    """
    directory = default_model_files()
    # The tokenizer and the weights are opened by path, which a zip archive has none of.
    if not isinstance(directory, Path):
        raise CheckpointError(
            f"the embedded default model is inside an archive ({directory}); install qwen35-jax "
            "with pip, as plain files"
        )
    missing = [name for name in _FILES if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"the embedded default model lacks {', '.join(missing)} in {directory}; install "
            "qwen35-jax again, or name another model"
        )
    return directory


def default_model_files() -> Traversable:
    """The same directory, whatever it holds: for its chat template, which needs no weights."""
    return resources.files("qwen35_jax") / "assets" / DEFAULT_MODEL_NAME
