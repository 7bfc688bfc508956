"""From a config to an engine: checks before the weights, what a start takes and gives back."""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from qwen35_jax.compile_cache import CompileCounter
from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.plan import CHUNK
from qwen35_jax.engine.runner import Runner
from qwen35_jax.errors import ConfigError
from qwen35_jax.loading import load_engine, max_num_batched_tokens, plan_for
from qwen35_jax.model_files import find_model
from tests.support.engines import (
    fast_compilation,
    ids_of,
    request,
    run,
    small_engine_config,
    write_two_layer_checkpoint,
)
from tests.support.tiny_tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID, VOCABULARY_SIZE


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


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_an_engine_has_the_limits_of_its_config_and_takes_the_memory_of_its_plan(directory: str):
    before = live_bytes()
    config = small_engine_config(Path(directory), seed=5)
    loaded = load_engine(config)
    plan, engine, scheduler = loaded.memory_plan, loaded.engine, loaded.engine.scheduler
    assert live_bytes() - before == plan.weight_bytes + plan.state_bytes + plan.kv_bytes
    assert (scheduler.max_num_seqs, scheduler.page_size) == (9, 16)
    assert (scheduler.max_num_batched_tokens, scheduler.max_chunks) == (317, -(-317 // CHUNK))
    assert engine.stats().kv_tokens == plan.kv_tokens == 4608
    assert (loaded.max_model_len, engine.max_model_len, engine.seed) == (2304, 2304, 5)
    # The model's own vocabulary is padded; ends are those of config and tokenizer.
    assert (engine.vocabulary_size, loaded.params.config.vocab_size) == (VOCABULARY_SIZE, 384)
    assert engine.stop_token_ids == {END_OF_TEXT_ID, END_OF_TURN_ID}
    engine.close()
    assert live_bytes() - before == plan.weight_bytes


def test_more_sequences_than_fit_start_with_what_fits_and_it_is_said(
    directory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    options = {"max_model_len": 128, "kv_cache_tokens": None, "max_num_batched_tokens": 1025}
    two = small_engine_config(Path(directory), max_num_seqs=2, **options)
    budget = plan_for(find_model(two), two).used_bytes + 10**6
    monkeypatch.setattr("qwen35_jax.loading.memory_budget", lambda *_, **__: budget)
    config = small_engine_config(Path(directory), max_num_seqs=1024, **options)
    caplog.set_level(logging.INFO, "qwen35_jax")
    plan = plan_for(find_model(config), config)
    fitting = plan.max_num_seqs
    assert 2 <= fitting < 20
    loaded = load_engine(config)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"max_num_seqs 1024 does not fit: {fitting} sequences run at once" in warning
    assert plan.table() in caplog.text
    requests = [request(f"r{number}", (number + 1,), max_tokens=3) for number in range(2 * fitting)]
    outputs = run(loaded.engine, *requests)
    assert loaded.engine.stats().max_num_seqs == fitting
    assert {len(ids_of(outputs[one.request_id])) for one in requests} == {3}
    loaded.engine.close()


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (
            jax.errors.JaxRuntimeError,
            ConfigError,
            "does not fit on cpu as planned: RESOURCE_EXHAUSTED: no memory; lower",
        ),
        (KeyboardInterrupt, KeyboardInterrupt, ""),
    ],
    ids=["no memory", "Ctrl-C"],
)
@pytest.mark.parametrize("place", ["compile", "rehearse"])
def test_a_start_that_fails_gives_everything_back(
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: type[BaseException],
    raised: type[BaseException],
    said: str,
):
    counters: list[CompileCounter] = []

    class Recorded(CompileCounter):
        def close(self) -> None:
            super().close()
            counters.append(self)

    def fail(*_: object, **__: object) -> None:
        raise error("RESOURCE_EXHAUSTED: no memory\nmore")

    monkeypatch.setattr(Runner, "compile", lambda *_, **__: None)
    monkeypatch.setattr(Runner, place, fail)
    monkeypatch.setattr("qwen35_jax.loading.CompileCounter", Recorded)
    before = live_bytes()
    with pytest.raises(raised) as caught:
        load_engine(small_engine_config(Path(directory)))
    assert said in str(caught.value)
    assert len(counters) == 1
    del caught
    assert live_bytes() == before
