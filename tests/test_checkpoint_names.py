"""The name table against the parameters, the reference's names and the published lists."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qwen35_jax.checkpoint import named_parameters
from qwen35_jax.checkpoint_names import bare_name, skipped_group, stored_name, tensor_slots
from qwen35_jax.config import ModelConfig
from qwen35_jax.model.transformer import Qwen35, parameter_count
from tests.support.checkpoints import LONG_PREFIX
from tests.support.models import tiny_config
from tests.support.published_configs import SIZES, published_config
from tests.support.tiny_models import TINY_CONFIGS, text_tensor_shapes

PUBLISHED_TENSORS = Path(__file__).resolve().parents[2] / "shared" / "qwen35" / "tensors_4b.json"


def _all_configs() -> dict[str, ModelConfig]:
    published = {size: ModelConfig.from_dict(published_config(size)) for size in SIZES}
    return published | {name: tiny_config(name) for name in TINY_CONFIGS}


@pytest.mark.parametrize("config", _all_configs().values(), ids=_all_configs())
def test_table_fills_every_parameter_exactly_once(config: ModelConfig) -> None:
    slots = tensor_slots(config)
    assert max(Counter(slot.name for slot in slots).values()) == 1
    parameters = dict(named_parameters(Qwen35(config)))
    assert {slot.path for slot in slots} == parameters.keys()
    sizes = Counter[str]()
    for slot in slots:
        sizes[slot.path] += int(np.prod(slot.shape))
    assert sizes == {path: leaf.size for path, leaf in parameters.items()}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_table_names_the_tensors_of_the_reference(name: str) -> None:
    slots = {slot.name: slot.shape for slot in tensor_slots(tiny_config(name))}
    assert slots == text_tensor_shapes(TINY_CONFIGS[name])


@pytest.mark.parametrize(
    ("size", "parameters", "tensors"),
    [
        ("0.8B", 752_393_024, 320),
        ("2B", 1_881_825_088, 320),
        ("4B", 4_205_751_296, 426),
        ("9B", 8_953_803_264, 427),
        ("27B", 26_895_998_464, 851),
    ],
)
def test_published_sizes_have_their_published_counts(
    size: str, parameters: int, tensors: int
) -> None:
    config = ModelConfig.from_dict(published_config(size))
    assert parameter_count(Qwen35(config)) == parameters
    assert len(tensor_slots(config)) == tensors


@pytest.mark.skipif(
    not PUBLISHED_TENSORS.exists(),
    reason=f"the list of published tensors isn't at {PUBLISHED_TENSORS}",
)
def test_table_equals_the_published_tensor_list() -> None:
    published = json.loads(PUBLISHED_TENSORS.read_text())
    text = {
        name.removeprefix(LONG_PREFIX): tuple(entry["shape"])
        for name, entry in published.items()
        if name.startswith(LONG_PREFIX)
    }
    config = ModelConfig.from_dict(published_config("4B"))
    assert {slot.name: slot.shape for slot in tensor_slots(config)} == text


@pytest.mark.parametrize(
    ("stored", "bare"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.norm.weight", None),
        ("norm.weight", None),
    ],
)
def test_stored_names_lose_their_prefix(stored: str, bare: str | None) -> None:
    assert bare_name(stored) == bare


def test_written_names_are_read_back() -> None:
    for slot in tensor_slots(tiny_config("ratio3_untied")):
        assert bare_name(stored_name(slot.name)) == slot.name
        assert skipped_group(stored_name(slot.name)) is None


def test_vision_and_prediction_tensors_have_their_groups() -> None:
    assert skipped_group("model.visual.blocks.0.attn.qkv.weight") == "vision"
    assert skipped_group("mtp.fc.weight") == "multi-token prediction"
    assert skipped_group("model.layers.0.mtp.weight") is None
