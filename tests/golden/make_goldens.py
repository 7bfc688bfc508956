"""Makes the .npz files beside it with transformers' own Qwen3.5 on the CPU.

Needs torch, transformers 5.17 and safetensors; the tests that read the files need none of them.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from transformers import (  # pyright: ignore[reportMissingImports]
    DynamicCache,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import (  # pyright: ignore[reportMissingImports]
    modeling_qwen3_5 as modeling,
)

GOLDEN = Path(__file__).resolve().parent
sys.path.insert(0, str(GOLDEN.parents[1]))

from tests.support import tiny_models  # noqa: E402
from tests.support.tiny_models import LayerKind  # noqa: E402

Arrays = dict[str, np.ndarray]

# These two keep every prompt length; the others keep the borders of a 64-token chunk.
FULL_CONFIGS = ("ratio2_tied", "ratio3_untied")
FULL_LENGTHS = (*range(1, 131), 257, 513)
THIN_LENGTHS = (*range(1, 9), 31, 32, 33, *range(61, 69), 97, *range(126, 131), 257, 513)
FULL_DECODE_LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 130, 257)
THIN_DECODE_LENGTHS = (1, 3, 64, 65, 257)
DECODE_STEPS = 16
CONTINUATION_PIECES = (70, 1, 2, 3, 63, 64, 65)
WHOLE_LENGTH = 97
WHOLE_ROW_STRIDE = 12

BLOCK_CONFIGS = ("ratio2_tied", "ratio3_untied")
BLOCK_TOKENS = 70
# Norms and MLPs act on each token alone, so a few rows show them.
BLOCK_ROWS = (0, 3, 31, 63, 64, 69)

# Coprime to the head and tile widths, so the kept entries fall on all of them.
CHANNEL_STRIDE = 127
STATE_STRIDES = (3, 15, 15)
CONV_STRIDE = 31

_TORCH_PATHS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def require_reference_path() -> None:
    """RuntimeError where transformers would run anything but its plain torch functions."""
    installed = [
        name
        for name in ("fla", "causal_conv1d", "kernels")
        if importlib.util.find_spec(name) is not None
    ]
    if installed:
        raise RuntimeError(f"{', '.join(installed)} would replace the reference: uninstall it")
    for name in _TORCH_PATHS:
        function = getattr(modeling, name)
        replaced = [
            cell.cell_contents
            for variable, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            )
            if variable == "is_new_implementation"
        ]
        if replaced != [False]:
            raise RuntimeError(f"{name} is not transformers' torch reference")


def hf_text_config(config: dict[str, Any]) -> Qwen3_5TextConfig:
    text = tiny_models.text_config(config)
    # from_pretrained and the layers take their precision as an argument, not from here.
    return Qwen3_5TextConfig(**{key: value for key, value in text.items() if key != "dtype"})


def load_model(config: dict[str, Any], dtype: torch.dtype) -> Qwen3_5ForCausalLM:
    """The model as users get it: a checkpoint with BF16 and F32 tensors through from_pretrained.

    A bfloat16 load casts the F32 tensors too; that is the rounding the strict goldens pin.
    """
    tensors = {}
    for name, array in tiny_models.tiny_weights(config).items():
        tensor = torch.from_numpy(array)
        if not tiny_models.is_stored_float32(name):
            tensor = tensor.bfloat16()
        tensors[name if name == "lm_head.weight" else f"model.{name}"] = tensor
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        hf_text_config(config).save_pretrained(folder)
        model, report = Qwen3_5ForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise RuntimeError(f"checkpoint and model disagree: {problems}")
    wrong = [name for name, tensor in model.named_parameters() if tensor.dtype != dtype]
    if wrong:
        raise RuntimeError(f"not loaded as {dtype}: {wrong}")
    return model.eval()


def forward(model: Any, ids: np.ndarray, cache: DynamicCache | None = None) -> np.ndarray:
    """Logits [T, vocabulary] of ids [T]; a cache is continued and updated in place."""
    output = model(torch.from_numpy(ids)[None], past_key_values=cache, use_cache=cache is not None)
    return output.logits[0].float().numpy()


def greedy(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next DECODE_STEPS greedy ids and the logits [DECODE_STEPS, vocabulary] after each."""
    cache = DynamicCache(config=model.config)
    next_id = int(forward(model, prompt, cache)[-1].argmax())
    ids, logits = [], []
    for _ in range(DECODE_STEPS):
        ids.append(next_id)
        logits.append(forward(model, np.array([next_id]), cache)[-1])
        next_id = int(logits[-1].argmax())
    return np.array(ids, np.int32), np.stack(logits)


def model_goldens(name: str) -> Arrays:
    config = tiny_models.TINY_CONFIGS[name]
    model = load_model(config, torch.float32)
    is_full = name in FULL_CONFIGS
    lengths = FULL_LENGTHS if is_full else THIN_LENGTHS
    decode_lengths = FULL_DECODE_LENGTHS if is_full else THIN_DECODE_LENGTHS
    ids = tiny_models.golden_ids(config, 513)
    arrays = {
        "ids": ids.astype(np.int32),
        "prefill.lengths": np.array(lengths, np.int32),
        "prefill.logits": np.stack([forward(model, ids[:length])[-1] for length in lengths]),
        "whole.rows": np.arange(0, WHOLE_LENGTH, WHOLE_ROW_STRIDE, dtype=np.int32),
        "whole.logits": forward(model, ids[:WHOLE_LENGTH])[::WHOLE_ROW_STRIDE],
    }

    decoded = [greedy(model, ids[:length]) for length in decode_lengths]
    arrays["decode.lengths"] = np.array(decode_lengths, np.int32)
    arrays["decode.ids"] = np.stack([step_ids for step_ids, _ in decoded])
    arrays["decode.logits"] = np.stack([logits for _, logits in decoded])

    cache, start, rows = DynamicCache(config=model.config), 0, []
    for piece in CONTINUATION_PIECES:
        rows.append(forward(model, ids[start : start + piece], cache)[-1])
        start += piece
    arrays["continuation.pieces"] = np.array(CONTINUATION_PIECES, np.int32)
    arrays["continuation.logits"] = np.stack(rows)
    check_model_goldens(name, model, arrays)
    return arrays


def check_model_goldens(name: str, model: Any, arrays: Arrays) -> None:
    """RuntimeError where the reference disagrees with itself or a greedy choice is a near tie."""
    ids, lengths = arrays["ids"].astype(np.int64), arrays["prefill.lengths"]
    whole = forward(model, ids)
    ends = np.cumsum(arrays["continuation.pieces"])
    errors = {
        "prefill": np.abs(arrays["prefill.logits"] - whole[lengths - 1]).max(),
        "continuation": np.abs(arrays["continuation.logits"] - whole[ends - 1]).max(),
        "whole": np.abs(arrays["whole.logits"] - whole[arrays["whole.rows"]]).max(),
        "decode": 0.0,
    }
    margin = np.inf
    for length, step_ids, logits in zip(
        arrays["decode.lengths"], arrays["decode.ids"], arrays["decode.logits"], strict=True
    ):
        rows = forward(model, np.concatenate([ids[:length], step_ids]))[length - 1 :]
        errors["decode"] = max(errors["decode"], np.abs(logits - rows[1:]).max())
        top = np.sort(rows, axis=-1)
        margin = min(margin, float((top[:-1, -1] - top[:-1, -2]).min()))
    distinct = len(np.unique(arrays["decode.ids"]))
    print(
        f"{name}: logit std {whole.std():.2f}, smallest greedy margin {margin:.4f}, "
        f"{distinct} distinct ids, "
        + ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
    )
    if max(errors.values()) > 5e-4 or margin < 5e-3 or not 1.0 < whole.std() < 5.0:
        raise RuntimeError(f"{name} is not fit to be a golden")


def record_blocks(
    model: Any, run: Callable[[], np.ndarray]
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Run, and keep each block's input and output: {"layers.0.mlp.input": [T, width], ...}."""
    seen: dict[str, torch.Tensor] = {}

    def watch(module: Any, key: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            seen[f"{key}.input"] = (args[0] if args else kwargs["hidden_states"])[0].clone()
            seen[f"{key}.output"] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(model.model.norm, "norm")]
    for index, layer in enumerate(model.model.layers):
        mixer = layer.linear_attn if layer.block_type == "linear_attention" else layer.self_attn
        handles += [
            watch(layer.input_layernorm, f"layers.{index}.input_layernorm"),
            watch(mixer, f"layers.{index}.mixer"),
            watch(layer.post_attention_layernorm, f"layers.{index}.post_attention_layernorm"),
            watch(layer.mlp, f"layers.{index}.mlp"),
        ]
    try:
        result = run()
    finally:
        for handle in handles:
            handle.remove()
    return seen, result


def bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype != torch.bfloat16:
        raise RuntimeError(f"expected bfloat16, found {tensor.dtype}")
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def block_goldens(name: str) -> Arrays:
    config = tiny_models.TINY_CONFIGS[name]
    model = load_model(config, torch.bfloat16)
    ids = tiny_models.golden_ids(config, BLOCK_TOKENS + 1)
    cache = DynamicCache(config=model.config)
    arrays: Arrays = {"ids": ids.astype(np.int32), "rows": np.array(BLOCK_ROWS, np.int32)}

    blocks, logits = record_blocks(model, lambda: forward(model, ids[:BLOCK_TOKENS], cache))
    for key, tensor in blocks.items():
        is_mixer = ".mixer." in key
        arrays[f"prefill.{key}"] = bits(tensor if is_mixer else tensor[list(BLOCK_ROWS)])
    arrays["prefill.logits"] = tiny_models.to_bfloat16_bits(logits)

    for index, kind in enumerate(model.config.layer_types):
        layer = cache.layers[index]
        if kind == "linear_attention":
            state = layer.recurrent_states[0][0]
            if state.dtype != torch.float32:
                raise RuntimeError(f"expected a float32 recurrent state, found {state.dtype}")
            # Copies: the decode step below updates the cache in place.
            arrays[f"state.layers.{index}.recurrent"] = state.numpy().copy()
            arrays[f"state.layers.{index}.conv"] = bits(layer.conv_states[0][0].clone())
        else:
            arrays[f"state.layers.{index}.key"] = bits(layer.keys[0].clone())
            arrays[f"state.layers.{index}.value"] = bits(layer.values[0].clone())

    blocks, logits = record_blocks(model, lambda: forward(model, ids[BLOCK_TOKENS:], cache))
    for key, tensor in blocks.items():
        arrays[f"decode.{key}"] = bits(tensor)
    arrays["decode.logits"] = tiny_models.to_bfloat16_bits(logits)
    print(f"{name}: bfloat16 blocks, {len(arrays)} arrays")
    return arrays


def real_layer_goldens(kind: LayerKind, dtype: torch.dtype) -> Arrays:
    config = hf_text_config(tiny_models.real_layer_config())
    config._attn_implementation = "eager"
    weights = {
        name: torch.from_numpy(array)
        for name, array in tiny_models.real_layer_weights(kind).items()
    }
    index = config.layer_types.index(kind)
    with torch.device("meta"):
        layer = modeling.Qwen3_5DecoderLayer(config, index)
    layer.load_state_dict(weights, assign=True)
    layer = layer.to(dtype).eval()
    hidden = torch.from_numpy(tiny_models.real_layer_input())[None].to(dtype)
    tokens = hidden.shape[1]
    positions = torch.arange(tokens)[None, None].expand(3, 1, -1)
    rotary = modeling.Qwen3_5TextRotaryEmbedding(config)(hidden, positions)
    mask = None
    if kind == "full_attention":
        mask = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    cache = DynamicCache(config=config)
    mixed = []
    mixer = layer.linear_attn if kind == "linear_attention" else layer.self_attn
    mixer.register_forward_hook(
        lambda _module, _args, output: mixed.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    output = layer(hidden, position_embeddings=rotary, attention_mask=mask, past_key_values=cache)

    def stored(tensor: torch.Tensor) -> np.ndarray:
        return bits(tensor) if tensor.dtype == torch.bfloat16 else tensor.contiguous().numpy()

    arrays = {
        "mixer.output": stored(mixed[0][0, :, ::CHANNEL_STRIDE]),
        "layer.output": stored(output[0, :, ::CHANNEL_STRIDE]),
    }
    if kind == "linear_attention":
        heads, keys, values = STATE_STRIDES
        arrays["recurrent"] = (
            cache.layers[index].recurrent_states[0][0, ::heads, ::keys, ::values].numpy().copy()
        )
        arrays["conv"] = stored(cache.layers[index].conv_states[0][0, ::CONV_STRIDE])
    spread = [float(tensor.float().std()) for tensor in (mixed[0], output)]
    print(f"real {kind} {dtype}: mixer std {spread[0]:.2f}, layer std {spread[1]:.2f}")
    return arrays


def write(name: str, arrays: Arrays) -> int:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    path = GOLDEN / f"{name}.npz"
    stored: dict[str, Any] = arrays | {"versions": np.array(json.dumps(versions))}
    np.savez_compressed(path, **stored)
    return path.stat().st_size


@torch.inference_mode()
def main() -> None:
    require_reference_path()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    total = 0
    for name in tiny_models.TINY_CONFIGS:
        total += write(f"model_{name}", model_goldens(name))
    for name in BLOCK_CONFIGS:
        total += write(f"blocks_{name}", block_goldens(name))
    real: Arrays = {
        "strides.channel": np.array(CHANNEL_STRIDE, np.int32),
        "strides.recurrent": np.array(STATE_STRIDES, np.int32),
        "strides.conv": np.array(CONV_STRIDE, np.int32),
    }
    kinds: tuple[LayerKind, ...] = ("linear_attention", "full_attention")
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            precision = str(dtype).removeprefix("torch.")
            for key, array in real_layer_goldens(kind, dtype).items():
                real[f"{kind}.{precision}.{key}"] = array
    total += write("real_layers", real)
    print(f"{total} bytes in all")


if __name__ == "__main__":
    main()
