"""From command-line options to an EngineConfig."""

import argparse
import logging
import shlex

import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine_arguments import (
    add_cache_arguments,
    add_dry_run_argument,
    add_engine_arguments,
    add_seed_argument,
    engine_config,
    print_memory_plan,
)
from qwen35_jax.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    add_dry_run_argument(parser)
    add_seed_argument(parser, help="seed")
    return parser


def config_of(flags: str) -> EngineConfig:
    parser = make_parser()
    return engine_config(parser, parser.parse_args(shlex.split(flags)), seed=3)


def test_without_flags_it_is_the_default_config():
    assert config_of("") == EngineConfig(seed=3)


def test_every_flag_reaches_its_field():
    assert config_of(
        "some/model --max-model-len 64 --max-num-seqs 3 --dtype float32 --load-format dummy "
        "--numerics transformers --max-num-batched-tokens 317 --gpu-memory-utilization 0.5 "
        "--kv-cache-tokens 1000 --block-size 16 --compilation-cache-dir none --dry-run --seed 9 "
        "--strict-compilation"
    ) == EngineConfig(
        model="some/model",
        max_model_len=64,
        max_num_seqs=3,
        dtype="float32",
        load_format="dummy",
        numerics="transformers",
        max_num_batched_tokens=317,
        gpu_memory_utilization=0.5,
        kv_cache_tokens=1000,
        block_size=16,
        compilation_cache_dir="none",
        strict_compilation=True,
        seed=3,
    )


def test_command_without_the_cache_options_takes_their_defaults():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    arguments = parser.parse_args(["--model", "some/model"])
    assert engine_config(parser, arguments, seed=0) == EngineConfig(model="some/model")


def test_every_field_of_the_config_has_a_flag():
    assert set(EngineConfig.__dataclass_fields__) <= {
        action.dest for action in make_parser()._actions
    }


def test_the_plan_is_printed_and_its_warnings_are_logged(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    # As on a device that states a limit, where the weights fit and few sequences.
    monkeypatch.setattr("qwen35_jax.loading.memory_budget", lambda *_, **__: 700 * 2**20)
    print_memory_plan(EngineConfig(max_num_seqs=1000, max_model_len=1024))
    printed = capsys.readouterr().out
    assert printed.startswith("Memory plan\n") and " sequences at once" in printed
    (warning,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert "1,000" in warning.message or "1000" in warning.message


def test_a_plan_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("qwen35_jax.loading.memory_budget", lambda *_, **__: 2**20)
    with pytest.raises(ConfigError):
        print_memory_plan(EngineConfig())


def test_dry_run_is_off_unless_asked_for():
    assert make_parser().parse_args([]).dry_run is False
    assert make_parser().parse_args(["--dry-run"]).dry_run is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu-memory-utilization 90", "gpu_memory_utilization is a share"),
        ("--kv-cache-tokens 0", "kv_cache_tokens must be a positive integer"),
        ("--max-num-seqs 317 --max-num-batched-tokens 317", "max_num_batched_tokens"),
        ("--model ''", None),
    ],
)
def test_values_are_checked_by_the_config(flags: str, message: str | None):
    if message is None:
        assert config_of(flags).model == ""
        return
    with pytest.raises(ConfigError, match=message):
        config_of(flags)


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("2048 on a GPU, 512 on a CPU", "0.9)", "auto)", "64)", "16)"):
        assert f"(default: {default}" in text
    assert "16, 32, 64, 128, 256" in text
