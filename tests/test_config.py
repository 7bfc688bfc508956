"""ModelConfig from files and dicts, and EngineConfig."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.errors import ConfigError
from tests.support.published_configs import SIZES, published_config
from tests.support.tiny_models import TINY_CONFIGS, text_config

Fields = dict[str, Any]


# name of the size: full layers, layers, rows of the embedding's width, value heads, tied
PUBLISHED = {
    "0.8B": (6, 24, 1024, 16, True),
    "2B": (6, 24, 2048, 16, True),
    "4B": (8, 32, 2560, 32, True),
    "9B": (8, 32, 4096, 32, False),
    "27B": (16, 64, 5120, 48, False),
}


@pytest.mark.parametrize("size", SIZES)
def test_published_config_loads(size: str) -> None:
    config = ModelConfig.from_dict(published_config(size))
    full, layers, hidden, value_heads, tied = PUBLISHED[size]
    assert config.layer_types.count("full_attention") == full
    assert config.num_hidden_layers == layers
    assert config.hidden_size == hidden
    assert config.linear_num_value_heads == value_heads
    assert config.tie_word_embeddings is tied
    assert (config.rotary_dim, config.rope_theta, config.rms_norm_eps) == (64, 1e7, 1e-6)
    assert (config.dtype, config.numerics, config.eos_token_ids) == (
        "bfloat16",
        "checkpoint",
        (248044,),
    )
    assert config.linear_conv_dim == 2 * 2048 + value_heads * 128


@pytest.mark.parametrize("size", SIZES)
def test_flat_config_equals_the_nested_one(size: str) -> None:
    nested = published_config(size)
    flat = nested["text_config"] | {"tie_word_embeddings": nested["tie_word_embeddings"]}
    assert ModelConfig.from_dict(flat) == ModelConfig.from_dict(nested)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_layer_types_come_from_the_list_or_the_interval(name: str) -> None:
    config = ModelConfig.from_dict(TINY_CONFIGS[name])
    assert list(config.layer_types) == text_config(TINY_CONFIGS[name])["layer_types"]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_to_dict_is_read_back_as_the_same_config(name: str) -> None:
    config = ModelConfig.from_dict(TINY_CONFIGS[name])
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(head_dim=st.integers(2, 512), half=st.integers(1, 256))
def test_to_dict_keeps_every_rotary_dimension(head_dim: int, half: int) -> None:
    config = ModelConfig.from_dict(published_config("4B"))
    config = config.replace(head_dim=head_dim, rotary_dim=min(2 * half, head_dim // 2 * 2))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_config_is_hashable_and_frozen() -> None:
    config = ModelConfig.from_dict(published_config("4B"))
    assert hash(config) == hash(ModelConfig.from_dict(published_config("4B")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_replace_checks_again() -> None:
    config = ModelConfig.from_dict(published_config("4B"))
    assert config.replace(dtype="float32").dtype == "float32"
    with pytest.raises(ConfigError, match="dtype must be one of bfloat16, float32, not 'float16'"):
        config.replace(dtype="float16")


def test_older_field_names_are_read() -> None:
    fields = published_config("4B")
    text = fields["text_config"]
    rope = text.pop("rope_parameters")
    del text["dtype"]
    text |= {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": 0.25,
        "torch_dtype": "float32",
    }
    config = ModelConfig.from_dict(fields)
    assert (config.rope_theta, config.rotary_dim, config.dtype) == (1e7, 64, "float32")


def write(directory: Path, content: object, name: str = "config.json") -> Path:
    path = directory / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_file_and_its_directory_both_load(tmp_path: Path) -> None:
    path = write(tmp_path, published_config("4B"))
    expected = ModelConfig.from_dict(published_config("4B"))
    assert ModelConfig.from_file(path) == expected
    assert ModelConfig.from_file(str(tmp_path)) == expected


def test_generation_config_adds_its_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, published_config("4B"))
    write(tmp_path, {"eos_token_id": [248046, 248044]}, "generation_config.json")
    assert ModelConfig.from_file(tmp_path).eos_token_ids == (248044, 248046)


def test_generation_config_with_a_wrong_end_token_is_named(tmp_path: Path) -> None:
    write(tmp_path, published_config("4B"))
    write(tmp_path, {"eos_token_id": "end"}, "generation_config.json")
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id"):
        ModelConfig.from_file(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"3",
        b"[]",
        b"null",
        b'"text"',
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
    ids=["empty", "cut", "no text", "number", "list", "null", "string", "deep list", "deep object"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_file_is_one_line_that_names_it(name: str, content: bytes, tmp_path: Path) -> None:
    write(tmp_path, published_config("4B"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / name) in message and "\n" not in message


def test_refused_field_names_its_file_too(tmp_path: Path) -> None:
    path = write(tmp_path, published_config("4B") | {"model_type": "llama"})
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value) and "llama" in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelConfig.from_file(tmp_path)


def test_directory_named_like_the_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path)


def test_engine_defaults_are_valid() -> None:
    assert EngineConfig() == EngineConfig(model=None, max_num_seqs=16)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("load_format", ["pt", "", None, 3, []]),
        ("dtype", ["float16", "", None, 3, []]),
        ("numerics", ["fast", None, []]),
        ("max_model_len", [0, -1, True, 1.5, "8", []]),
        ("max_num_seqs", [0, -1, True, 1.5, "8", None]),
        ("max_num_batched_tokens", [0, -1, True, 1.5, "8"]),
        ("gpu_memory_utilization", [0, -0.5, True, "0.9", None, math.nan, math.inf, 1.0, 0.98]),
        ("kv_cache_tokens", [0, -1, True, 1.5, "8"]),
        ("block_size", [0, 8, 48, 512, True, "64", None]),
        ("compilation_cache_dir", [3, b"cache", Path("cache")]),
        ("strict_compilation", [None, 1, "yes"]),
        ("seed", [None, True, 1.5, "8"]),
    ],
)
def test_engine_option_of_a_wrong_value_is_named(field: str, values: list[object]) -> None:
    for value in values:
        options: Fields = {field: value}
        with pytest.raises(ConfigError, match=field):
            EngineConfig(**options)


@pytest.mark.parametrize(
    ("value", "advice"), [(90, "share of the device's memory, as 0.9; not 90"), (0.99, "try 0.9")]
)
def test_utilization_that_leaves_nothing_is_refused_with_advice(value: float, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        EngineConfig(gpu_memory_utilization=value)


def test_step_without_room_for_a_prompt_names_both_options_and_the_way_out() -> None:
    assert EngineConfig(max_num_seqs=33, max_num_batched_tokens=34).max_num_seqs == 33
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_num_seqs=33, max_num_batched_tokens=33)
    message = str(caught.value)
    assert "max_num_batched_tokens (33)" in message and "max_num_seqs (33)" in message
    assert "raise the one to 34 or more, or lower the other" in message


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def cache_path(name: str | None) -> Path | None:
    return EngineConfig(compilation_cache_dir=name).compilation_cache_path()


def test_compiled_programs_are_kept_in_the_users_cache_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Path("qwen35-jax") / "compile"
    assert EngineConfig().compilation_cache_path() == home / ".cache" / ours
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_path("auto") == home / ".cache" / ours
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert cache_path("auto") == home / "elsewhere" / ours


def test_the_cache_directory_that_jax_was_told_of_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "jax-cache")
    assert cache_path("auto") == Path("jax-cache")
    assert cache_path("~/mine") == home / "mine"


@pytest.mark.parametrize("name", [None, "", "none"])
def test_compiled_programs_need_not_be_kept(name: str | None, home: Path) -> None:
    assert cache_path(name) is None


def test_a_user_without_a_home_keeps_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_path("auto") is None
