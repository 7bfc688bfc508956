"""Qwen35 parameters from the arrays of tiny_models, and one layer run on its own."""

from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.checkpoint import named_parameters
from qwen35_jax.checkpoint_names import TensorSlot, tensor_slots
from qwen35_jax.config import Dtype, LayerType, ModelConfig, Numerics
from qwen35_jax.model.attention import GatedAttention
from qwen35_jax.model.cache import AttentionCache, DeltaNetState, ModelState, init_state
from qwen35_jax.model.layers import rope_tables
from qwen35_jax.model.transformer import DecoderLayer, Qwen35
from tests.support import tiny_models
from tests.support.tiny_models import LayerKind

GOLDEN_DIRECTORY = Path(__file__).resolve().parents[1] / "golden"

# Most programs of the tests run a few times, so that compiling them takes longer than they do.
COMPILE_FAST = {"xla_backend_optimization_level": 0}

Goldens = dict[str, np.ndarray]
LayerState = AttentionCache | DeltaNetState


def load_goldens(name: str) -> Goldens:
    with np.load(GOLDEN_DIRECTORY / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def tiny_config(
    name: str, *, dtype: Dtype = "float32", numerics: Numerics = "checkpoint"
) -> ModelConfig:
    config = ModelConfig.from_dict(tiny_models.TINY_CONFIGS[name])
    return config.replace(dtype=dtype, numerics=numerics)


def tiny_params(
    name: str,
    *,
    dtype: Dtype = "float32",
    numerics: Numerics = "checkpoint",
    layers: int | None = None,
) -> Qwen35:
    """The model whose outputs tests/golden/model_{name}.npz records, or its first `layers`."""
    weights = tiny_models.tiny_weights(tiny_models.TINY_CONFIGS[name])
    config = tiny_config(name, dtype=dtype, numerics=numerics)
    config = config.replace(layer_types=config.layer_types[:layers])
    return filled(Qwen35(config), tensor_slots(config), weights)


def real_layer(
    kind: LayerKind, weights: dict[str, np.ndarray], *, dtype: Dtype, numerics: Numerics
) -> DecoderLayer:
    """One layer of 4B size with the weights behind tests/golden/real_layers.npz.

    weights: what tiny_models.real_layer_weights(kind) gives.
    """
    config = ModelConfig.from_dict(tiny_models.real_layer_config())
    config = config.replace(dtype=dtype, numerics=numerics)
    prefix = f"layers.{config.layer_types.index(kind)}."
    slots = [
        TensorSlot(
            name=slot.name.removeprefix(prefix),
            shape=slot.shape,
            path=slot.path.removeprefix(prefix),
            form=slot.form,
        )
        for slot in tensor_slots(config)
        if slot.name.startswith(prefix)
    ]
    return filled(DecoderLayer(config, kind), slots, weights)


def filled[Module: (Qwen35, DecoderLayer)](
    abstract: Module, slots: list[TensorSlot], weights: dict[str, np.ndarray]
) -> Module:
    """`abstract` with arrays for its shapes, joined in numpy, apart from the loader's code."""
    parts: dict[str, list[TensorSlot]] = defaultdict(list)
    for slot in slots:
        parts[slot.path].append(slot)
    leaves = [
        jnp.asarray(_joined(parts[path], weights), leaf.dtype)
        for path, leaf in named_parameters(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _joined(slots: list[TensorSlot], weights: dict[str, np.ndarray]) -> np.ndarray:
    columns = []
    for slot in slots:
        weight = weights[slot.name]
        if slot.form == "transposed":
            weight = weight.T
        elif slot.form == "squeezed":
            weight = weight.squeeze(1)
        columns.append(weight)
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=-1)


def run_mixer(
    layer: DecoderLayer,
    x: jax.Array,
    state: LayerState,
    *,
    start: int = 0,
) -> tuple[jax.Array, LayerState]:
    """The layer's attention or delta net on x [B, T, D], the tokens from `start` on."""
    batch, length, _ = x.shape
    positions = jnp.broadcast_to(start + jnp.arange(length), (batch, length))
    valid = jnp.ones((batch, length), bool)
    if isinstance(layer.mixer, GatedAttention):
        assert isinstance(state, AttentionCache)
        return layer.mixer(x, state, positions, valid, rope_tables(positions, layer.config))
    assert isinstance(state, DeltaNetState)
    return layer.mixer(x, state, valid, None)


def layer_state(config: ModelConfig, kind: LayerType, *, batch: int, capacity: int) -> LayerState:
    """A fresh state of one layer."""
    one = config.replace(layer_types=(kind,))
    return init_state(one, batch, capacity).layers[0]


def forked(state: ModelState, rows: list[int]) -> ModelState:
    """The state with rows selected, repeated or reordered."""
    return jax.tree.map(lambda leaf: leaf[jnp.array(rows)], state)


def relative_error(actual: jax.Array | np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference over the largest expected magnitude."""
    difference = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    return float(difference.max() / np.abs(expected).max())


def assert_same_params(actual: Qwen35, expected: Qwen35) -> None:
    """Configs, dtypes and every bit."""
    assert actual.config == expected.config
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, one), (_, other) in zip(
        named_parameters(actual), named_parameters(expected), strict=True
    ):
        assert one.dtype == other.dtype, path
        np.testing.assert_array_equal(one, other, err_msg=path)
