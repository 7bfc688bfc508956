"""Every config.json that isn't this engine's model is refused by field, whatever JSON it holds."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError
from tests.support.published_configs import SIZES, published_config

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


UNSUPPORTED: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "RoPE scaling at the top": (
        published_config("4B") | {"rope_scaling": {"type": "yarn"}},
        ("rope_scaling", "yarn"),
    ),
    "local experts": (with_text(num_local_experts=8), ("num_local_experts", "8")),
    "two RoPE bases": (with_text(rope_theta=1e4), ("rope_theta", "contradicts")),
    "negative section": (with_rope(mrope_section=[100, -79, 11]), ("mrope_section",)),
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
