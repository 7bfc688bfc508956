"""Compiled programs: kept on disk from start to start, and counted, so that none comes late."""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)

# JAX tells of it before a program is made (as a scalar) and after (as a duration), whether XLA
# compiles it or the cache on disk has it.
_PROGRAM_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


def enable_compile_cache(directory: str | os.PathLike[str] | None) -> Path | None:
    """Have JAX keep every program that it compiles in `directory`, and look there first.

    Returns the directory; None where it can't be written, which is one line in the log, and for
    None, which leaves JAX as it is. The cache holds machine code: its directory is made for its
    owner alone.
    """
    if directory is None:
        return None
    path = Path(directory).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        logger.warning(
            "compilation_cache_dir %s can't be written (%s): every start compiles anew; name "
            "another directory, or none",
            directory,
            reason,
        )
        return None
    if jax.config.values["jax_compilation_cache_dir"] != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        # It may have settled on another directory, or on none.
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


class CompileCounter:
    """Counts the programs that JAX makes in this process, from start() to close().

    num_compiled: by XLA. num_cache_hits: read from the cache on disk instead.
    late_programs: names of those that came after mark_ready(), whether compiled or read, inside
    `watch()`: other code of the process, a second engine perhaps, compiles what it likes.
    strict: raise RuntimeError in place of a late program, before it is made.
    """

    def __init__(self, *, strict: bool = False):
        self._strict = strict
        self._lock = threading.Lock()
        self._thread = _ThreadState()
        self._is_ready = False
        self._is_counting = False
        self.num_compiled = 0
        self.num_cache_hits = 0
        self.late_programs: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            monitoring.register_scalar_listener(self._before_program)
            monitoring.register_event_listener(self._on_event)
            monitoring.register_event_duration_secs_listener(self._after_program)

    def close(self) -> None:
        """Stop counting; the counts stay. May be called twice."""
        if self._is_counting:
            self._is_counting = False
            monitoring.unregister_scalar_listener(self._before_program)
            monitoring.unregister_event_listener(self._on_event)
            monitoring.unregister_event_duration_listener(self._after_program)

    def mark_ready(self) -> None:
        """From now on a program made inside `watch()` is late."""
        self._is_ready = True

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around the engine's own work in this thread."""
        before, self._thread.is_watched = self._thread.is_watched, True
        try:
            yield
        finally:
            self._thread.is_watched = before

    def _before_program(self, event: str, value: float, **details: str | int) -> None:
        if event != _PROGRAM_EVENT:
            return
        self._thread.is_hit = False
        if not self._is_ready or not self._thread.is_watched:
            return
        name = str(details.get("fun_name", "a program"))
        with self._lock:
            self.late_programs.append(name)
        if self._strict:
            raise RuntimeError(
                f"{name} is not among the programs compiled before the engine was ready, and "
                "strict_compilation is on"
            )

    def _on_event(self, event: str, **details: str | int) -> None:
        if event == _HIT_EVENT:
            self._thread.is_hit = True

    def _after_program(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _PROGRAM_EVENT:
            with self._lock:
                self.num_cache_hits += self._thread.is_hit
                self.num_compiled += not self._thread.is_hit


class _ThreadState(threading.local):
    """is_hit: whether the program that the thread now makes was on disk."""

    is_watched: bool = False
    is_hit: bool = False
