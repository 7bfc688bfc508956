"""The embedded default model: the real layout, the same bytes every time, safe to make at once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tokenizers

from qwen35_jax import default_model
from qwen35_jax.config import ModelConfig
from qwen35_jax.default_model import default_model_directory
from qwen35_jax.errors import CheckpointError
from qwen35_jax.tokenizer import Tokenizer
from qwen35_jax.tokenizer_recipe import ADDED_TOKENS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "not" / "there" / "yet"
    monkeypatch.setenv("QWEN35_CACHE_DIR", str(cache))
    return cache


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def test_it_is_made_once_and_found_again(cache: Path) -> None:
    directory = default_model_directory()
    assert directory.parent == cache
    written = (directory / "config.json").stat().st_mtime_ns
    assert default_model_directory() == directory
    assert (directory / "config.json").stat().st_mtime_ns == written


def test_every_file_has_the_same_bytes_in_another_process(cache: Path) -> None:
    first = default_model_directory()
    other_cache = cache.parent / "other"
    code = "from qwen35_jax.default_model import default_model_directory as make; print(make())"
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "QWEN35_CACHE_DIR": str(other_cache), "PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    )
    second = Path(made.stdout.strip())
    assert second.name == first.name
    assert _contents(second) == _contents(first)


def test_it_is_made_in_under_a_second(cache: Path) -> None:
    start = time.process_time()
    default_model_directory()
    assert time.process_time() - start < 1.0


def test_the_directory_holds_the_published_files(cache: Path) -> None:
    assert sorted(_contents(default_model_directory())) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors-00001-of-00002.safetensors",
        "model.safetensors-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_config_is_nested_and_read_by_model_config(cache: Path) -> None:
    directory = default_model_directory()
    assert "text_config" in json.loads((directory / "config.json").read_text())
    config = ModelConfig.from_file(directory)
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.hidden_size, config.intermediate_size) == (128, 256)
    assert (config.head_dim, config.rotary_dim) == (64, 16)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (2, 4)
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings


def test_the_index_names_every_tensor_of_both_shards_and_their_bytes(cache: Path) -> None:
    directory = default_model_directory()
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    for path in directory.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="numpy") as shard:
            found |= dict.fromkeys(shard.keys(), path.name)
    assert index["weight_map"] == found
    assert len(set(found.values())) == 2
    total = sum(tensor.nbytes for tensor in _tensors(directory).values())
    assert index["metadata"]["total_size"] == total


def test_tensors_have_the_published_names_shapes_and_dtypes(cache: Path) -> None:
    directory = default_model_directory()
    tensors = _tensors(directory)
    root = "model.language_model"
    linear, full = f"{root}.layers.0.linear_attn", f"{root}.layers.3.self_attn"
    config = ModelConfig.from_file(directory)
    expected = {
        f"{root}.embed_tokens.weight": (config.vocab_size, 128),
        f"{root}.norm.weight": (128,),
        f"{root}.layers.0.input_layernorm.weight": (128,),
        f"{root}.layers.0.post_attention_layernorm.weight": (128,),
        f"{root}.layers.0.mlp.gate_proj.weight": (256, 128),
        f"{root}.layers.0.mlp.up_proj.weight": (256, 128),
        f"{root}.layers.0.mlp.down_proj.weight": (128, 256),
        f"{linear}.in_proj_qkv.weight": (2 * 64 + 128, 128),
        f"{linear}.in_proj_z.weight": (128, 128),
        f"{linear}.in_proj_b.weight": (4, 128),
        f"{linear}.in_proj_a.weight": (4, 128),
        f"{linear}.conv1d.weight": (2 * 64 + 128, 1, 4),
        f"{linear}.dt_bias": (4,),
        f"{linear}.A_log": (4,),
        f"{linear}.norm.weight": (32,),
        f"{linear}.out_proj.weight": (128, 128),
        f"{full}.q_proj.weight": (2 * 4 * 64, 128),
        f"{full}.k_proj.weight": (2 * 64, 128),
        f"{full}.v_proj.weight": (2 * 64, 128),
        f"{full}.o_proj.weight": (128, 4 * 64),
        f"{full}.q_norm.weight": (64,),
        f"{full}.k_norm.weight": (64,),
    }
    assert {name: tensors[name].shape for name in expected} == expected
    # 2 at the root; 5 of norms and MLP in each layer; 9 of each delta layer; 6 of attention.
    assert len(tensors) == 2 + 4 * 5 + 3 * 9 + 6
    float32 = {name for name, tensor in tensors.items() if tensor.dtype == np.float32}
    kept_in_float32 = {"A_log", "norm.weight"}
    assert float32 == {
        f"{root}.layers.{layer}.linear_attn.{name}"
        for layer in range(3)
        for name in kept_in_float32
    }
    assert all(tensors[name].dtype == ml_dtypes.bfloat16 for name in tensors.keys() - float32)
    assert all(np.isfinite(tensor.astype(np.float32)).all() for tensor in tensors.values())


def test_the_vocabulary_is_padded_so_that_masking_matters(cache: Path) -> None:
    directory = default_model_directory()
    vocab_size = ModelConfig.from_file(directory).vocab_size
    used = Tokenizer.from_directory(directory).vocabulary_size
    assert used < vocab_size <= used + 64
    assert vocab_size % 64 == 0


def test_added_tokens_have_the_ids_after_the_merges_and_their_flags(cache: Path) -> None:
    tokenizer = Tokenizer.from_directory(default_model_directory())
    first = tokenizer.vocabulary_size - len(ADDED_TOKENS)
    assert len(ADDED_TOKENS) == 33
    for place, (content, special) in enumerate(ADDED_TOKENS):
        assert tokenizer.encode(content) == [first + place]
        assert tokenizer.is_special(first + place) is special


def test_the_vocabulary_file_alone_lacks_the_last_seven_tokens(cache: Path) -> None:
    directory = default_model_directory()
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert backend.token_to_id("</think>") is not None
    assert backend.token_to_id("<|audio_start|>") is None


def test_the_two_end_tokens_come_from_two_files(cache: Path) -> None:
    directory = default_model_directory()
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    config = ModelConfig.from_file(directory)
    assert config.eos_token_ids == (tokenizer.token_to_id("<|endoftext|>"),)


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "ďábelské 🔥👩‍👩‍👧 你好 ไทย हिन्दी",
        "\t x\r\n\n  y  ",
        "\0\x7f",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(cache: Path, text: str) -> None:
    tokenizer = Tokenizer.from_directory(default_model_directory())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_merges_common_words_and_splits_digits(cache: Path) -> None:
    tokenizer = Tokenizer.from_directory(default_model_directory())
    assert len(tokenizer.encode(" the capital")) == 2
    assert len(tokenizer.encode("1024")) == 4


def test_the_chat_template_is_the_packaged_one(cache: Path) -> None:
    template = default_model_directory() / "chat_template.jinja"
    packaged = Path(default_model.__file__).parent / "assets" / "chat_template.jinja"
    assert template.read_bytes() == packaged.read_bytes()


def test_two_processes_make_it_at_once(cache: Path) -> None:
    code = "from qwen35_jax.default_model import default_model_directory as make; print(make())"
    racing = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = {process.communicate()[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0, 0]
    assert printed == {str(default_model_directory())}
    assert [path.name for path in cache.iterdir()] == [default_model_directory().name]


def test_a_process_that_loses_the_race_uses_the_winner_s(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = default_model._write_checkpoint

    def write_while_another_wins(directory: Path) -> None:
        monkeypatch.setattr(default_model, "_write_checkpoint", real_write)
        default_model_directory()
        real_write(directory)

    monkeypatch.setattr(default_model, "_write_checkpoint", write_while_another_wins)
    directory = default_model_directory()
    assert [path.name for path in cache.iterdir()] == [directory.name]


def test_a_failure_half_way_leaves_nothing_that_looks_finished(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(directory: Path, text_config: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_model, "_write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            default_model_directory()
    assert list(cache.iterdir()) == []
    assert default_model._is_whole(default_model_directory())


def test_a_directory_that_lost_a_file_is_mended(cache: Path) -> None:
    directory = default_model_directory()
    whole = _contents(directory)
    (directory / "tokenizer.json").unlink()
    assert _contents(default_model_directory()) == whole
    assert [path.name for path in cache.iterdir()] == [directory.name]


def test_a_change_of_the_recipe_gets_another_directory(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = default_model_directory()
    real = default_model._package_file

    def changed(name: str) -> bytes:
        return real(name) + (b" " if name == "assets/chat_template.jinja" else b"")

    monkeypatch.setattr(default_model, "_package_file", changed)
    assert default_model_directory() != first


def test_an_unwritable_cache_is_one_line_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in the way stops root too, as permissions would not.
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("QWEN35_CACHE_DIR", str(in_the_way / "cache"))
    with pytest.raises(CheckpointError, match="set QWEN35_CACHE_DIR to a directory") as raised:
        default_model_directory()
    message = str(raised.value)
    assert str(in_the_way / "cache") in message
    assert "\n" not in message


def test_a_full_disk_is_reported_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, text_config: dict[str, object]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default_model, "_write_weights", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        default_model_directory()
    assert list(cache.iterdir()) == []
