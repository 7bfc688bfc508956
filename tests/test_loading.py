"""From a config to an engine: what is checked before the weights, and what a second start saves."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from qwen35_jax.compile_cache import CompileCounter
from qwen35_jax.config import EngineConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.loading import load_engine, max_num_batched_tokens, plan_for
from qwen35_jax.model_files import find_model
from tests.support.engines import fast_compilation, write_two_layer_checkpoint


@pytest.fixture(autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(write_two_layer_checkpoint(tmp_path / "model"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A compile cache that only this test fills; JAX's is as before after it."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.values["jax_compilation_cache_dir"]
    yield str(tmp_path / "cache")
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_step_takes_the_devices_usual_number_of_tokens_and_one_of_each_sequence():
    assert max_num_batched_tokens(EngineConfig()) == 512
    assert max_num_batched_tokens(EngineConfig(max_num_seqs=500)) == 564
    assert max_num_batched_tokens(EngineConfig(max_num_batched_tokens=317)) == 317


def test_a_plan_is_made_without_reading_weights(directory: str):
    (Path(directory) / "model.safetensors.index.json").unlink(missing_ok=True)
    for shard in Path(directory).glob("*.safetensors"):
        shard.unlink()
    config = EngineConfig(model=directory, max_num_seqs=3, max_model_len=200)
    plan = plan_for(find_model(config), config)
    assert plan.max_num_seqs == 3
    assert "weights" in plan.table()


def test_a_second_start_reads_its_programs_from_the_cache(directory: str, own_cache: str):
    config = EngineConfig(
        model=directory, max_num_seqs=2, max_model_len=128, compilation_cache_dir=own_cache
    )
    first = start(config)
    # A new process has nothing in memory either.
    jax.clear_caches()
    second = start(config)
    assert first.num_compiled > 0
    made_again = second.num_cache_hits + second.num_compiled
    assert second.num_cache_hits >= 0.95 * made_again
    assert made_again >= 5


def start(config: EngineConfig) -> CompileCounter:
    loaded = load_engine(config)
    loaded.engine.close()
    assert loaded.engine.compile_counter is not None
    return loaded.engine.compile_counter


def test_a_cache_that_cannot_be_written_is_a_warning_and_no_end(
    directory: str, tmp_path: Path, own_cache: str, caplog: pytest.LogCaptureFixture
):
    Path(own_cache).write_text("a file", encoding="utf-8")
    config = EngineConfig(
        model=directory, max_num_seqs=1, max_model_len=128, compilation_cache_dir=own_cache
    )
    with caplog.at_level(logging.WARNING, logger="qwen35_jax"):
        load_engine(config).engine.close()
    assert any(own_cache in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 8193}, "max_model_len 8193 is over"),
        ({"kv_cache_tokens": 64}, "kv"),
    ],
)
def test_what_cannot_be_is_told_before_the_weights_are_read(
    directory: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("qwen35_jax.loading.load_or_make_params", never)
    with pytest.raises(ConfigError, match=rf"(?i){said}"):
        load_engine(EngineConfig(model=directory, **options))
