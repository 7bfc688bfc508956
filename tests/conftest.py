"""What every test runs under: JAX on the CPU, no network."""

import logging
import os

# Before any import of jax, which reads it once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# A failure on one machine is a failure on every other: no random seeds, no time limits.
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


@pytest.fixture(scope="session", autouse=True)
def _own_compile_cache() -> Iterator[None]:
    """Programs are compiled once a session, in child processes too, and never kept for the next:
    stale ones would hide what compiling does now."""
    with (
        tempfile.TemporaryDirectory(prefix="qwen35-tests-") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("JAX_COMPILATION_CACHE_DIR", directory)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Connections to other machines fail; those to this one are what server tests use."""
    real_connect = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        assert local, f"a test tried to reach {address[0]}"
        real_connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        yield


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Commands set up logging for a process of their own; give this one's back."""
    package, root = logging.getLogger("qwen35_jax"), logging.getLogger()
    before = (package.handlers, package.propagate, package.level, list(root.handlers))
    yield
    package.handlers, package.propagate, level, root.handlers = before
    package.setLevel(level)
