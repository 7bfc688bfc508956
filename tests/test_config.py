"""ModelConfig and EngineConfig: what loads, and that everything else is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.config import EngineConfig, ModelConfig, cache_directory
from qwen35_jax.errors import ConfigError
from tests.support.published_configs import SIZES, published_config
from tests.support.tiny_models import TINY_CONFIGS, text_config

Fields = dict[str, Any]


def refusal(fields: object) -> str:
    """The message of the ConfigError that these fields raise: always one line."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(fields)  # pyright: ignore[reportArgumentType]
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_text(**changes: Any) -> Fields:
    """The published 4B config with fields of text_config changed; `None` values stay."""
    fields = published_config("4B")
    fields["text_config"] |= changes
    return fields


def with_rope(**changes: Any) -> Fields:
    fields = published_config("4B")
    fields["text_config"]["rope_parameters"] |= changes
    return fields


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


UNSUPPORTED: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "experts": (with_text(num_experts=128), ("num_experts", "128")),
    "experts a token": (with_text(num_experts_per_tok=8), ("num_experts_per_tok", "8")),
    "dense layers among experts": (with_text(mlp_only_layers=[0]), ("mlp_only_layers",)),
    "mixture model": (
        published_config("4B") | {"model_type": "qwen3_5_moe"},
        ("model_type", "qwen3_5_moe"),
    ),
    "mixture text model": (
        with_text(model_type="qwen3_5_moe_text"),
        ("model_type", "qwen3_5_moe_text"),
    ),
    "another model": (published_config("4B") | {"model_type": "llama"}, ("model_type", "llama")),
    "fp8": (
        published_config("4B") | {"quantization_config": {"quant_method": "fp8"}},
        ("quantization_config", "quant_method fp8 is not supported"),
    ),
    "awq": (
        published_config("4B") | {"quantization_config": {"quant_method": "awq", "bits": 4}},
        ("quantization_config", "quant_method awq is not supported"),
    ),
    "gptq in text_config": (
        with_text(quantization_config={"quant_method": "gptq"}),
        ("quantization_config", "quant_method gptq is not supported"),
    ),
    "quantised somehow": (
        published_config("4B") | {"quantization_config": "yes"},
        ("quantization_config",),
    ),
    "yarn": (
        with_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=262144),
        ("rope_parameters.rope_type", "yarn"),
    ),
    "yarn by its older name": (with_rope(type="yarn"), ("rope_parameters.type", "yarn")),
    "linear scaling without a type": (with_rope(factor=2.0), ("rope_parameters.factor",)),
    "rope_scaling": (
        with_text(rope_scaling={"type": "linear", "factor": 2.0}),
        ("rope_scaling", "linear"),
    ),
    "unknown layer type": (
        with_text(layer_types=["full_attention"] * 31 + ["sliding_attention"]),
        ("layer_types[31]", "sliding_attention"),
    ),
    "too few layer types": (
        with_text(layer_types=["full_attention"] * 31),
        ("layer_types", "num_hidden_layers is 32", "31"),
    ),
    "layer types that are no list": (with_text(layer_types="full_attention"), ("layer_types",)),
    "query heads no multiple": (
        with_text(num_attention_heads=15),
        ("num_attention_heads (15)", "num_key_value_heads (4)"),
    ),
    "value heads no multiple": (
        with_text(linear_num_value_heads=24),
        ("linear_num_value_heads (24)", "linear_num_key_heads (16)"),
    ),
    "odd rotary dimensions": (
        with_rope(partial_rotary_factor=0.25 + 1 / 256, mrope_section=None),
        ("partial_rotary_factor", "65"),
    ),
    "no rotary dimensions": (
        with_rope(partial_rotary_factor=0.001, mrope_section=None),
        ("partial_rotary_factor",),
    ),
    "rotary factor over 1": (with_rope(partial_rotary_factor=1.5), ("partial_rotary_factor",)),
    "M-RoPE sections": (
        with_rope(mrope_section=[11, 11, 11]),
        ("rope_parameters.mrope_section", "64"),
    ),
    "no output gate": (with_text(attn_output_gate=False), ("attn_output_gate",)),
    "attention bias": (with_text(attention_bias=True), ("attention_bias",)),
    "gelu": (with_text(hidden_act="gelu"), ("hidden_act", "gelu")),
    "sliding window": (with_text(sliding_window=4096), ("sliding_window", "4096")),
    "half precision state": (with_text(mamba_ssm_dtype="float16"), ("mamba_ssm_dtype",)),
    "another dtype": (with_text(dtype="float16"), ("dtype", "float16")),
    "a convolution of one": (with_text(linear_conv_kernel_dim=1), ("linear_conv_kernel_dim",)),
    "no layers": (with_text(num_hidden_layers=0, layer_types=[]), ("num_hidden_layers",)),
    "tie that differs": (
        published_config("4B") | {"tie_word_embeddings": False},
        ("tie_word_embeddings",),
    ),
    "text_config that is a list": (
        published_config("4B") | {"text_config": []},
        ("text_config",),
    ),
    "nothing": ({}, ("model_type",)),
}


@pytest.mark.parametrize(("fields", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_model_is_refused_by_field(fields: Fields, words: tuple[str, ...]) -> None:
    message = refusal(fields)
    assert all(word in message for word in words), message


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_size_is_named(field: str) -> None:
    fields = published_config("4B")
    del fields["text_config"][field]
    assert f"{field} is missing" in refusal(fields)


@pytest.mark.parametrize("value", ["32", True, None, [32], {"a": 1}, 1.5, 0, -4])
@pytest.mark.parametrize("field", REQUIRED)
def test_size_of_a_wrong_type_is_named(field: str, value: object) -> None:
    assert f"{field} must be a positive integer" in refusal(with_text(**{field: value}))


WRONG_TYPES: dict[str, list[object]] = {
    "rms_norm_eps": ["1e-6", True, [], {}, -1e-6, 0, float("nan"), float("inf")],
    "tie_word_embeddings": ["true", 1, [], {}],
    "eos_token_id": ["248044", True, -1, 1.5, {}, [[1]], ["a"], [None]],
    "dtype": [3, [], {}, ["bfloat16"]],
    "layer_types": [3, {}, [[]] * 32, [{}] * 32, [None] * 32],
    "rope_parameters": [3, [], "default", True],
    "model_type": [3, [], {}, None],
    "attention_bias": ["no", [], {}],
    "hidden_act": [3, [], {}],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in WRONG_TYPES.items() for value in values],
)
def test_field_of_a_wrong_type_is_named(field: str, value: object) -> None:
    assert field in refusal(with_text(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", value)
        for value in ("1e7", True, None, [], 0, -1, float("nan"), float("inf"), 10**400)
    ]
    + [("partial_rotary_factor", value) for value in ("x", True, [], 0, -1, float("nan"))]
    + [("mrope_section", value) for value in (3, "abc", {}, [[11], [11], [10]], ["a"], [1.5] * 3)]
    + [("rope_type", value) for value in (3, [], {})],
)
def test_rope_field_of_a_wrong_type_is_named(field: str, value: object) -> None:
    assert field in refusal(with_rope(**{field: value}))


@pytest.mark.parametrize("interval", [0, -1, "4", True, 1.5, [4], {}])
def test_interval_of_a_wrong_type_is_named(interval: object) -> None:
    fields = with_text(full_attention_interval=interval)
    del fields["text_config"]["layer_types"]
    assert "full_attention_interval" in refusal(fields)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.sampled_from([0, 1, 2**31, 2**63, 10**400])
    | st.floats()
    | st.sampled_from(["", "default", "yarn", "bfloat16", "full_attention", "qwen3_5", "4"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data(), value=JSON)
@settings(max_examples=600)
def test_any_value_in_any_field_works_or_is_a_config_error(data: st.DataObject, value: Any) -> None:
    fields = published_config(data.draw(st.sampled_from(SIZES)))
    text = fields["text_config"]
    level = (fields, text, text["rope_parameters"])[data.draw(st.integers(0, 2))]
    added = ["quantization_config", "rope_scaling", "torch_dtype", "rope_theta", "type", "\n"]
    level[data.draw(st.sampled_from([*level, *added]))] = value
    if data.draw(st.booleans()):
        fields = text
    try:
        config = ModelConfig.from_dict(fields)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
    else:
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


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
    path = write(tmp_path, with_text(num_experts=8))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value) and "num_experts" in str(caught.value)


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
        ("seed", [None, True, 1.5, "8"]),
    ],
)
def test_engine_option_of_a_wrong_value_is_named(field: str, values: list[object]) -> None:
    for value in values:
        options: Fields = {field: value}
        with pytest.raises(ConfigError, match=field):
            EngineConfig(**options)


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_CACHE_DIR", "/chosen")
    assert cache_directory() == Path("/chosen")
    monkeypatch.delenv("QWEN35_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/base")
    assert cache_directory() == Path("/base/qwen35-jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "qwen35-jax"
