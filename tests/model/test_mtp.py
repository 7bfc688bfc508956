"""The multi-token prediction layer: its tensors, its inputs, its cache."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from qwen35_jax.checkpoint import fill_parameters, load_checkpoint, named_parameters
from qwen35_jax.checkpoint_writer import save_checkpoint
from qwen35_jax.model.cache import init_attention_cache
from qwen35_jax.model.mtp import predict_hidden
from qwen35_jax.model.transformer import Qwen35
from tests.support.models import tiny_params


@pytest.fixture(scope="module")
def params() -> Qwen35:
    """A tiny model with a random prediction layer."""
    model = tiny_params("ratio2_tied", dtype="float32")
    leaves = dict(named_parameters(model))
    abstract = Qwen35(model.config, mtp=True)
    for index, (path, leaf) in enumerate(named_parameters(abstract)):
        if path.startswith("mtp."):
            key = jax.random.fold_in(jax.random.key(0), index)
            leaves[path] = 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype)
    return fill_parameters(abstract, leaves)


def _inputs(params: Qwen35, length: int) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(1)
    hidden = jax.random.normal(key, (2, length, params.config.hidden_size))
    return hidden, jax.random.randint(key, (2, length), 0, params.config.vocab_size)


def test_published_names_and_a_round_trip(params: Qwen35, tmp_path: Path) -> None:
    save_checkpoint(params, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="np") as tensors:
        names = {name for name in tensors.keys() if name.startswith("mtp.")}  # noqa: SIM118
    assert len(names) == 15
    assert "mtp.pre_fc_norm_embedding.weight" in names
    assert "mtp.layers.0.self_attn.q_proj.weight" in names
    loaded = load_checkpoint(tmp_path, mtp=True, progress=False)
    for (path, actual), (_, expected) in zip(
        named_parameters(loaded), named_parameters(params), strict=True
    ):
        np.testing.assert_array_equal(actual, expected, err_msg=path)
    assert not hasattr(load_checkpoint(tmp_path, progress=False), "mtp")


def test_a_position_sees_itself_and_those_before(params: Qwen35) -> None:
    hidden, ids = _inputs(params, 6)
    whole, _ = predict_hidden(params, hidden, ids)
    changed, _ = predict_hidden(params, hidden.at[:, 4].add(1.0), ids)
    np.testing.assert_array_equal(changed[:, :4], whole[:, :4])
    assert (changed[:, 4:] != whole[:, 4:]).any(axis=-1).all()


def test_the_embedding_half_of_fc_comes_first(params: Qwen35) -> None:
    hidden, ids = _inputs(params, 3)
    width = params.config.hidden_size
    leaves = dict(named_parameters(params))
    leaves["mtp.fc"] = leaves["mtp.fc"].at[width:].set(0.0)
    blind = fill_parameters(Qwen35(params.config, mtp=True), leaves)
    out, _ = predict_hidden(blind, hidden, ids)
    other, _ = predict_hidden(blind, 2.0 - hidden, ids)
    np.testing.assert_array_equal(out, other)


def test_token_by_token_equals_the_whole(params: Qwen35) -> None:
    hidden, ids = _inputs(params, 5)
    whole, _ = predict_hidden(params, hidden, ids)
    cache = init_attention_cache(params.config, 2, 5)
    pieces = []
    for step in range(5):
        position = jnp.full((2,), step, jnp.int32)
        now = slice(step, step + 1)
        out, cache = predict_hidden(params, hidden[:, now], ids[:, now], cache, position)
        pieces.append(out)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)
