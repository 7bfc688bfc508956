"""Compiled programs on disk, and counting them."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from qwen35_jax.compile_cache import CompileCounter, enable_compile_cache

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
ONES = np.ones(3, np.float32)


@pytest.fixture(autouse=True)
def _own_cache_settings() -> Iterator[None]:
    before = {name: jax.config.values[name] for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    with CompileCounter() as counting:
        yield counting


def fresh_program(addend: float = 1.0) -> Callable[[np.ndarray], jax.Array]:
    """One program, and never the one that this process has in memory."""

    def add_and_double(x: jax.Array) -> jax.Array:
        return 2 * (x + addend)

    return jax.jit(add_and_double)


def test_second_compilation_is_read_from_disk_and_gives_the_same(
    tmp_path: Path, counter: CompileCounter
):
    directory = tmp_path / "not" / "there yet"
    assert enable_compile_cache(directory) == directory
    first = fresh_program()(ONES)
    assert (counter.num_compiled, counter.num_cache_hits) == (1, 0)
    assert list(directory.iterdir())
    second = fresh_program()(ONES)
    assert (counter.num_compiled, counter.num_cache_hits) == (1, 1)
    np.testing.assert_array_equal(first, second)
    fresh_program(7.0)(ONES)
    assert (counter.num_compiled, counter.num_cache_hits) == (2, 1)


def test_donated_arguments_stay_donated_in_a_program_from_disk(
    tmp_path: Path, counter: CompileCounter
):
    enable_compile_cache(tmp_path)
    for _ in range(2):
        x = jnp.asarray(ONES)
        doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
        assert x.is_deleted()
        np.testing.assert_array_equal(doubled, 2 * ONES)
    assert counter.num_cache_hits >= 1


def test_cache_directory_is_for_its_owner_alone(tmp_path: Path):
    directory = tmp_path / "cache"
    enable_compile_cache(directory)
    assert directory.stat().st_mode & 0o077 == 0


def test_another_directory_is_used_from_then_on(tmp_path: Path, counter: CompileCounter):
    enable_compile_cache(tmp_path / "one")
    fresh_program()(ONES)
    enable_compile_cache(tmp_path / "two")
    fresh_program()(ONES)
    assert (counter.num_compiled, counter.num_cache_hits) == (2, 0)
    assert list((tmp_path / "two").iterdir())


def test_no_directory_leaves_jax_as_it_is(tmp_path: Path):
    assert enable_compile_cache(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    enable_compile_cache(tmp_path)
    assert enable_compile_cache(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)


@pytest.mark.parametrize("inside", [False, True], ids=["is a file", "is inside a file"])
def test_directory_that_cannot_be_written_is_one_warning(
    inside: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "file"
    path.write_bytes(b"")
    path = path / "cache" if inside else path
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache(path) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "can't be written" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert jax.config.values["jax_compilation_cache_dir"] is None
    np.testing.assert_array_equal(fresh_program()(ONES), 4 * ONES)


def test_path_that_cannot_be_one_is_a_warning(caplog: pytest.LogCaptureFixture):
    assert enable_compile_cache("a\0b") is None
    assert "can't be written" in caplog.text


def test_programs_of_all_threads_are_counted(counter: CompileCounter):
    def compile_one(addend: float) -> None:
        fresh_program(addend)(ONES)

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counter.num_compiled, counter.num_cache_hits) == (4, 0)


def test_running_again_is_not_compiling(counter: CompileCounter):
    program = fresh_program()
    for _ in range(3):
        program(ONES)
    assert counter.num_compiled == 1


def test_lowered_programs_and_single_operations_count_too(counter: CompileCounter):
    jax.jit(lambda x: x - 4).lower(jax.ShapeDtypeStruct((5,), jnp.float32)).compile()
    assert counter.num_compiled == 1
    jnp.full((3, 5, 7, 2), 3.5)
    assert counter.num_compiled > 1


def test_late_programs_are_those_of_watched_code_after_ready(counter: CompileCounter):
    with counter.watch():
        fresh_program()(ONES)
    counter.mark_ready()
    fresh_program()(ONES)
    assert counter.late_programs == []
    with counter.watch():
        fresh_program()(ONES)
    fresh_program()(ONES)
    assert counter.late_programs == ["jit(add_and_double)"]
    assert counter.num_compiled == 4


def test_what_another_thread_compiles_is_not_late(counter: CompileCounter):
    counter.mark_ready()
    with counter.watch():
        thread = threading.Thread(target=lambda: fresh_program()(ONES))
        thread.start()
        thread.join()
    assert counter.num_compiled == 1
    assert counter.late_programs == []


def test_a_late_program_from_disk_is_late_too(tmp_path: Path, counter: CompileCounter):
    enable_compile_cache(tmp_path)
    fresh_program()(ONES)
    counter.mark_ready()
    with counter.watch():
        fresh_program()(ONES)
    assert counter.num_cache_hits == 1
    assert counter.late_programs == ["jit(add_and_double)"]


def test_strict_raises_in_place_of_a_late_program():
    with CompileCounter(strict=True) as counter:
        known, unknown = fresh_program(), fresh_program()
        known(ONES)
        counter.mark_ready()
        with counter.watch():
            known(ONES)
            with pytest.raises(RuntimeError, match=r"jit\(add_and_double\) is not among"):
                unknown(ONES)
        assert counter.num_compiled == 1, "it was compiled before it was refused"
        assert counter.late_programs == ["jit(add_and_double)"]
        # Outside, the same function compiles as if nothing had been.
        np.testing.assert_array_equal(unknown(ONES), 4 * ONES)


def test_watching_ends_with_an_error_inside(counter: CompileCounter):
    counter.mark_ready()
    with pytest.raises(KeyError), counter.watch():
        raise KeyError
    fresh_program()(ONES)
    assert counter.late_programs == []


def test_closed_counter_counts_no_more():
    counter = CompileCounter(strict=True)
    counter.start()
    counter.start()
    counter.mark_ready()
    fresh_program()(ONES)
    counter.close()
    counter.close()
    with counter.watch():
        fresh_program()(ONES)
    assert (counter.num_compiled, counter.late_programs) == (1, [])
