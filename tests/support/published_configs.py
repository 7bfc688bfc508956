"""The text side of the config.json that each dense Qwen3.5 is published with."""

from typing import Any

_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
    "vocab_size": 248320,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}

_SIZE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
)
_SIZES: dict[str, tuple[int, ...]] = {
    "0.8B": (1024, 3584, 24, 8, 2, 16),
    "2B": (2048, 6144, 24, 8, 2, 16),
    "4B": (2560, 9216, 32, 16, 4, 32),
    "9B": (4096, 12288, 32, 16, 4, 32),
    "27B": (5120, 17408, 64, 24, 4, 48),
}
SIZES = tuple(_SIZES)
_TIED = ("0.8B", "2B", "4B")


def published_config(size: str) -> dict[str, Any]:
    """config.json of a size, without its vision_config. Fresh at each call, so free to change."""
    text: dict[str, Any] = _TEXT | dict(zip(_SIZE_FIELDS, _SIZES[size], strict=True))
    text["layer_types"] = [
        "linear_attention" if (index + 1) % 4 else "full_attention"
        for index in range(text["num_hidden_layers"])
    ]
    text["rope_parameters"] = {**text["rope_parameters"]}
    tied = size in _TIED
    if tied:
        # The untied sizes have this field at the top level alone.
        text["tie_word_embeddings"] = True
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }
