"""From command-line options to an EngineConfig."""

import argparse
import shlex

import pytest

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine_arguments import (
    add_cache_arguments,
    add_dry_run_argument,
    add_engine_arguments,
    add_seed_argument,
    engine_config,
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
        "--kv-cache-tokens 1000 --block-size 16 --compilation-cache-dir none --dry-run --seed 9"
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
        seed=3,
    )


def test_command_without_the_cache_options_takes_their_defaults():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    arguments = parser.parse_args(["--model", "some/model"])
    assert engine_config(parser, arguments, seed=0) == EngineConfig(model="some/model")


def test_dry_run_is_off_unless_asked_for():
    assert make_parser().parse_args([]).dry_run is False
    assert make_parser().parse_args(["--dry-run"]).dry_run is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu-memory-utilization 90", "gpu_memory_utilization is a share"),
        ("--kv-cache-tokens 0", "kv_cache_tokens must be a positive integer"),
        ("--max-num-seqs 4096", "max_num_batched_tokens"),
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
    for default in ("2048", "0.9", "auto", "64"):
        assert f"(default: {default})" in text
    assert "16, 32, 64, 128, 256" in text
