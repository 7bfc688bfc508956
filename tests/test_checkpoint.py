"""Loading: the layouts people have, everything that can be wrong with files, random weights."""

import logging
import mmap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwen35_jax.checkpoint import (
    load_checkpoint,
    load_or_make_params,
    named_parameters,
    random_params,
)
from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.model.delta_net import GatedDeltaNet
from qwen35_jax.model.transformer import Qwen35, forward, parameter_count
from tests.support.checkpoints import (
    LONG_PREFIX,
    SHARD_NAMES,
    SHORT_PREFIX,
    SINGLE_NAME,
    other_tensors,
    stored_tensors,
    write_bare_layout,
    write_config,
    write_flat_bfloat16_layout,
    write_published_layout,
    write_shards,
    write_single,
)
from tests.support.models import COMPILE_FAST, assert_same_params, tiny_config, tiny_params
from tests.support.tiny_models import TINY_CONFIGS, text_tensor_shapes

NAME = "ratio2_tied"


def load(directory: Path, **options: Any) -> Qwen35:
    return load_checkpoint(directory, progress=False, **options)


def load_error(directory: Path) -> str:
    """The message of the CheckpointError that loading raises: always one line."""
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_published_layout_loads(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qwen35_jax")
    params = load(write_published_layout(tmp_path, name))
    expected = tiny_params(name, dtype="bfloat16")
    assert params.config == expected.config
    assert_same_params(params, expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{parameter_count(params):,} parameters" in line
    assert "skipped 3 vision tensors" in line
    assert "skipped 2 multi-token prediction tensors" in line


@pytest.mark.parametrize("name", ["ratio2_tied", "ratio3_untied"])
def test_bare_layout_loads(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qwen35_jax")
    params = load(write_bare_layout(tmp_path, name))
    assert_same_params(params, tiny_params(name, dtype="bfloat16"))
    assert "skipped" not in caplog.text


@pytest.mark.parametrize("name", ["ratio2_tied", "ratio3_untied"])
def test_flat_layout_with_long_prefix_and_bfloat16_decay_loads(name: str, tmp_path: Path) -> None:
    params = load(write_flat_bfloat16_layout(tmp_path, name))
    expected = tiny_params(name, dtype="bfloat16")
    for layer in expected.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            for param in (layer.mixer.a_log, layer.mixer.norm):
                assert param[...].dtype == jnp.float32
                param[...] = param[...].astype(jnp.bfloat16).astype(jnp.float32)
    assert_same_params(params, expected)


def test_tied_model_ignores_a_stored_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qwen35_jax")
    tensors = stored_tensors(NAME, prefix=LONG_PREFIX)
    tensors["lm_head.weight"] = tensors[f"{LONG_PREFIX}embed_tokens.weight"]
    write_config(tmp_path, TINY_CONFIGS[NAME])
    write_single(tmp_path, tensors)
    assert_same_params(load(tmp_path), tiny_params(NAME, dtype="bfloat16"))
    assert "skipped 1 tied head tensors" in caplog.text


def test_half_precision_weights_load(tmp_path: Path) -> None:
    tensors = stored_tensors(NAME, prefix=LONG_PREFIX)
    write_config(tmp_path, TINY_CONFIGS[NAME])
    write_single(tmp_path, {name: array.astype(np.float16) for name, array in tensors.items()})
    params = load(tmp_path)
    assert params.embed[...].dtype == jnp.bfloat16
    expected = tiny_params(NAME, dtype="bfloat16").embed[...]
    np.testing.assert_array_equal(params.embed[...], expected)


def test_config_argument_chooses_dtype_and_numerics(tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    config = tiny_config(NAME, dtype="float32")
    assert_same_params(load(tmp_path, config=config), tiny_params(NAME, dtype="float32"))
    strict = tiny_config(NAME, dtype="bfloat16", numerics="transformers")
    loaded = load(tmp_path, config=strict)
    assert_same_params(loaded, tiny_params(NAME, dtype="bfloat16", numerics="transformers"))
    assert {leaf.dtype for _, leaf in named_parameters(loaded)} == {jnp.dtype("bfloat16")}


def test_every_wrong_tensor_is_named_in_one_message(tmp_path: Path) -> None:
    tensors = stored_tensors(NAME, prefix=LONG_PREFIX)
    layer = f"{LONG_PREFIX}layers.1"
    del tensors[f"{layer}.linear_attn.A_log"]
    del tensors[f"{LONG_PREFIX}norm.weight"]
    tensors[f"{layer}.mlp.up_proj.weight"] = np.zeros((3, 5), ml_dtypes.bfloat16)
    tensors[f"{layer}.linear_attn.dt_bias"] = np.zeros(4, np.int32)
    tensors[f"{layer}.mlp.extra.weight"] = np.zeros(2, np.float32)
    tensors["score.weight"] = np.zeros(2, np.float32)
    # The same tensor by its other name.
    doubled = f"{SHORT_PREFIX}layers.0.mlp.up_proj.weight"
    tensors[doubled] = tensors[f"{LONG_PREFIX}layers.0.mlp.up_proj.weight"]
    write_config(tmp_path, TINY_CONFIGS[NAME])
    write_shards(tmp_path, tensors)

    message = load_error(tmp_path)
    assert str(tmp_path) in message and "7 tensors" in message
    assert "missing layers.1.linear_attn.A_log" in message
    assert "missing norm.weight" in message
    assert f"{layer}.mlp.up_proj.weight is [3, 5], not [112, 64]" in message
    assert f"{layer}.linear_attn.dt_bias has dtype I32" in message
    assert f"unexpected {layer}.mlp.extra.weight" in message
    assert "unexpected score.weight" in message
    assert "doubled model." in message and "layers.0.mlp.up_proj.weight" in message
    assert all(shard in message for shard in SHARD_NAMES)


def test_a_long_list_of_wrong_tensors_is_cut_with_its_count(tmp_path: Path) -> None:
    write_config(tmp_path, TINY_CONFIGS[NAME])
    write_single(tmp_path, other_tensors())
    message = load_error(tmp_path)
    missing = len(text_tensor_shapes(TINY_CONFIGS[NAME]))
    assert f"{missing} tensors" in message
    assert message.count("missing") == 20
    assert f"and {missing - 20} more" in message


def test_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    other = TINY_CONFIGS[NAME]["text_config"] | {"intermediate_size": 96}
    write_config(tmp_path, TINY_CONFIGS[NAME] | {"text_config": other})
    assert "mlp.gate_proj.weight is [112, 64], not [96, 64]" in load_error(tmp_path)


def test_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    write_bare_layout(tmp_path, "ratio3_untied")
    tensors = stored_tensors("ratio3_untied", prefix=SHORT_PREFIX)
    del tensors["lm_head.weight"]
    write_single(tmp_path, tensors)
    assert "missing lm_head.weight" in load_error(tmp_path)


def test_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert "nowhere" in load_error(tmp_path / "nowhere")


def test_missing_config_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, stored_tensors(NAME, prefix=LONG_PREFIX))
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load(tmp_path)


def test_quantised_checkpoint_is_refused_before_its_files_are_opened(tmp_path: Path) -> None:
    write_config(tmp_path, TINY_CONFIGS[NAME] | {"quantization_config": {"quant_method": "fp8"}})
    (tmp_path / SINGLE_NAME).write_bytes(b"never read")
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="quant_method fp8 is not supported"):
        load(tmp_path)
    assert time.perf_counter() - started < 1


def test_parameters_outlive_their_file(tmp_path: Path) -> None:
    write_published_layout(tmp_path, NAME)
    params = load(tmp_path)
    for shard in SHARD_NAMES:
        path = tmp_path / shard
        size = path.stat().st_size
        # In place: a parameter that still shared the file's pages would change.
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as pages:
            pages[:] = bytes(size)
    assert_same_params(params, tiny_params(NAME, dtype="bfloat16"))


def test_random_params_have_the_loaded_shapes_and_dtypes(tmp_path: Path) -> None:
    loaded = load(write_published_layout(tmp_path, NAME))
    made = random_params(loaded.config)
    assert jax.tree.structure(made) == jax.tree.structure(loaded)
    for (path, one), (_, other) in zip(
        named_parameters(made), named_parameters(loaded), strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        assert np.std(np.asarray(one, np.float32)) > 0, path
    logits = jax.jit(forward, compiler_options=COMPILE_FAST)(made, jnp.zeros((1, 3), jnp.int32))
    assert np.isfinite(logits).all()


def test_random_params_follow_their_seed() -> None:
    config = tiny_config(NAME, dtype="float32")
    assert_same_params(random_params(config, 3), random_params(config, 3))
    first, second = random_params(config, 3), random_params(config, 4)
    for (path, one), (_, other) in zip(
        named_parameters(first), named_parameters(second), strict=True
    ):
        assert one.dtype == jnp.float32
        assert np.any(np.asarray(one) != np.asarray(other)), path


def test_load_format_chooses_between_file_and_random_weights(tmp_path: Path) -> None:
    config = tiny_config(NAME, dtype="bfloat16")
    write_published_layout(tmp_path, NAME)
    made = load_or_make_params(tmp_path / "nowhere", config, load_format="dummy", seed=5)
    assert_same_params(made, random_params(config, 5))
    loaded = load_or_make_params(tmp_path, config, load_format="auto", seed=5)
    assert_same_params(loaded, tiny_params(NAME, dtype="bfloat16"))
