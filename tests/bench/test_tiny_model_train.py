"""Training: what the loss counts, that it falls, and that a checkpoint comes out of it."""

import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.tiny_model import dataset
from bench.tiny_model.dataset import Batch
from bench.tiny_model.train import in_model_dtype, init_params, learning_rate, loss, main, train
from qwen35_jax.checkpoint import load_checkpoint, named_parameters
from qwen35_jax.checkpoint_writer import save_checkpoint
from qwen35_jax.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    rotary_dim=4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
LENGTH = 16


def repeated_batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, LENGTH)).astype(np.int32)
    mask = np.ones(ids.shape, np.float32)
    mask[:, 0] = 0.0
    return Batch(ids, mask)


@pytest.fixture(scope="module")
def trained():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "ROW_LENGTHS", (LENGTH,))
        yield train(
            init_params(CONFIG, seed=0),
            itertools.repeat(repeated_batch()),
            steps=300,
            peak_learning_rate=3e-3,
            deadline=math.inf,
            tokens_per_batch=4 * LENGTH,
        )


def test_the_loss_falls_for_the_model_and_for_its_drafts(trained):
    _, curve = trained
    assert [row["step"] for row in curve] == [100, 200, 300]
    uniform = math.log(CONFIG.vocab_size)
    assert curve[0]["loss"] > uniform / 2
    assert curve[-1]["loss"] < uniform / 4
    assert curve[-1]["mtp_loss"] < uniform / 4
    assert all(row["tokens_per_s"] > 0 for row in curve)


def test_a_loss_that_is_no_number_ends_training(monkeypatch):
    monkeypatch.setattr(dataset, "ROW_LENGTHS", (LENGTH,))
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, init_params(CONFIG, seed=0))
    with pytest.raises(FloatingPointError, match="at step 1: lower --learning-rate"):
        train(
            params,
            itertools.repeat(repeated_batch()),
            steps=1,
            peak_learning_rate=1e-3,
            deadline=math.inf,
            tokens_per_batch=4 * LENGTH,
        )


def test_every_parameter_is_trained_and_kept_in_float32(trained):
    params, _ = trained
    before = dict(named_parameters(init_params(CONFIG, seed=0)))
    for path, leaf in named_parameters(params):
        assert leaf.dtype == jnp.float32
        assert not np.array_equal(leaf, before[path]), path


def test_the_weights_load_as_the_model_keeps_them(trained, tmp_path):
    params, _ = trained
    save_checkpoint(in_model_dtype(params), tmp_path)
    loaded = dict(named_parameters(load_checkpoint(tmp_path, mtp=True)))
    for path, leaf in named_parameters(in_model_dtype(params)):
        assert leaf.dtype == loaded[path].dtype
        np.testing.assert_array_equal(leaf, loaded[path], err_msg=path)


def test_the_loss_weighs_each_id_by_the_mask():
    params, batch = init_params(CONFIG, seed=1), repeated_batch()
    ids, half = jnp.asarray(batch.ids), jnp.asarray(batch.mask).at[:, LENGTH // 2 :].set(0.0)
    one_loss = jax.jit(loss)
    reference, report = one_loss(params, ids, half)
    other_ids = ids.at[:, LENGTH // 2 :].set((ids[:, LENGTH // 2 :] + 1) % CONFIG.vocab_size)
    assert float(one_loss(params, other_ids, half)[0]) == pytest.approx(float(reference), rel=1e-6)
    assert float(one_loss(params, other_ids, half * 0.1)[0]) == pytest.approx(
        float(reference), rel=1e-5
    )
    assert float(one_loss(params, other_ids, batch.mask)[0]) != float(
        one_loss(params, ids, batch.mask)[0]
    )
    assert report["loss"] != report["mtp_loss"]


def test_the_learning_rate_warms_up_and_falls():
    rates = [learning_rate(1.0, step, step / 4000) for step in (1, 100, 200, 2000, 4000, 5000)]
    assert rates[0] == pytest.approx(1 / 200, rel=1e-3)
    assert rates[1] == pytest.approx(0.5, rel=0.01)
    assert rates[2] > 0.99
    assert 0.5 < rates[3] < 0.52
    assert rates[4] == rates[5] == pytest.approx(0.02)


def test_a_deadline_ends_training_with_the_rate_at_its_end(monkeypatch, capsys):
    monkeypatch.setattr(dataset, "ROW_LENGTHS", (LENGTH,))
    _, curve = train(
        init_params(CONFIG, seed=0),
        itertools.repeat(repeated_batch()),
        steps=10**9,
        peak_learning_rate=1e-3,
        deadline=time.perf_counter() + 1e-9,
        tokens_per_batch=4 * LENGTH,
    )
    assert [row["step"] for row in curve] == [1]
    assert '"step": 1' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--examples", "0"], "--examples"),
        (["--steps", "0"], "--steps"),
        (["--minutes", "-1"], "--minutes"),
        (["--tokens-per-batch", "383"], "--tokens-per-batch"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--seed", "-1"], "--seed"),
        (["--json", "/dev/null/curve.json"], "--json"),
    ],
)
def test_a_wrong_flag_is_refused_before_any_work(tmp_path, capsys, flags: list[str], named: str):
    assert main(["--out", str(tmp_path / "new"), *flags]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_directory_that_holds_something_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "config.json")]) == 2
    assert "can't be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
