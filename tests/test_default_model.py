"""The embedded default model: whole, small, in the published layout, shipped and only ever read."""

import json
import tomllib
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tokenizers

from bench.tiny_model.tokenizer_recipe import ADDED_TOKENS
from qwen35_jax import default_model
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.checkpoint import load_checkpoint
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.default_model import default_model_directory
from qwen35_jax.errors import CheckpointError
from qwen35_jax.loading import load_engine
from qwen35_jax.model.transformer import parameter_count
from qwen35_jax.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[1]
DIRECTORY = default_model_directory()
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
MOST_WEIGHT_BYTES = 12_000_000


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in DIRECTORY.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DIRECTORY)


def test_the_directory_holds_the_published_files_and_nothing_else():
    assert sorted(path.name for path in DIRECTORY.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in DIRECTORY.glob("*.safetensors")) <= MOST_WEIGHT_BYTES


def test_the_wheel_ships_every_file():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["qwen35_jax"]
    package = REPOSITORY / "qwen35_jax"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert shipped == {path for path in (package / "assets").rglob("*") if path.is_file()}
    assert {DIRECTORY / name for name in FILES} <= shipped


def test_the_package_holds_one_chat_template():
    templates = [path for path in (REPOSITORY / "qwen35_jax").rglob("*") if ".jinja" in path.name]
    assert templates == [DIRECTORY / "chat_template.jinja"]
    messages = [{"role": "user", "content": "Hello"}]
    template = ChatTemplate.from_directory(DIRECTORY)
    assert template is not None
    assert template.render(messages) == ChatTemplate.built_in().render(messages)


def test_the_config_has_the_real_architecture_and_head_sizes():
    assert "text_config" in json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_file(DIRECTORY)
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert (config.head_dim, config.rotary_dim) == (256, 64)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (128, 128)
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings


def test_the_index_names_every_tensor_and_their_bytes(tensors: dict[str, np.ndarray]):
    index = json.loads((DIRECTORY / "model.safetensors.index.json").read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for path in DIRECTORY.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="numpy") as shard:
            found |= dict.fromkeys(shard.keys(), path.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_tensors_have_the_published_names_shapes_and_dtypes(tensors: dict[str, np.ndarray]):
    config = ModelConfig.from_file(DIRECTORY)
    hidden, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_attention_heads * 256
    key_value_width = config.num_key_value_heads * 256
    value_heads = config.linear_num_value_heads
    value_width = value_heads * 128
    mixed_width = 2 * config.linear_num_key_heads * 128 + value_width
    root = "model.language_model"

    def norms_and_mlp(layer: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }

    def full_attention(part: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{part}.q_proj.weight": (2 * query_width, hidden),
            f"{part}.k_proj.weight": (key_value_width, hidden),
            f"{part}.v_proj.weight": (key_value_width, hidden),
            f"{part}.o_proj.weight": (hidden, query_width),
            f"{part}.q_norm.weight": (256,),
            f"{part}.k_norm.weight": (256,),
        }

    def linear_attention(part: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{part}.in_proj_qkv.weight": (mixed_width, hidden),
            f"{part}.in_proj_z.weight": (value_width, hidden),
            f"{part}.in_proj_b.weight": (value_heads, hidden),
            f"{part}.in_proj_a.weight": (value_heads, hidden),
            f"{part}.conv1d.weight": (mixed_width, 1, 4),
            f"{part}.dt_bias": (value_heads,),
            f"{part}.A_log": (value_heads,),
            f"{part}.norm.weight": (128,),
            f"{part}.out_proj.weight": (hidden, value_width),
        }

    expected: dict[str, tuple[int, ...]] = {
        f"{root}.embed_tokens.weight": (config.vocab_size, hidden),
        f"{root}.norm.weight": (hidden,),
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        **norms_and_mlp("mtp.layers.0"),
        **full_attention("mtp.layers.0.self_attn"),
    }
    kept_in_float32: set[str] = set()
    for number, layer_type in enumerate(config.layer_types):
        layer = f"{root}.layers.{number}"
        expected |= norms_and_mlp(layer)
        if layer_type == "full_attention":
            expected |= full_attention(f"{layer}.self_attn")
        else:
            expected |= linear_attention(f"{layer}.linear_attn")
            kept_in_float32 |= {f"{layer}.linear_attn.{name}" for name in ("A_log", "norm.weight")}
    # No lm_head: it is tied.
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    for name, tensor in tensors.items():
        assert tensor.dtype == (np.float32 if name in kept_in_float32 else ml_dtypes.bfloat16), name
        assert np.isfinite(tensor.astype(np.float32)).all(), name


def test_it_loads_with_its_multi_token_prediction_layer(tensors: dict[str, np.ndarray]):
    params = load_checkpoint(DIRECTORY, mtp=True, progress=False)
    assert hasattr(params, "mtp")
    assert parameter_count(params) == sum(tensor.size for tensor in tensors.values())


def test_the_vocabulary_is_padded_so_that_masking_matters(tokenizer: Tokenizer):
    vocab_size = ModelConfig.from_file(DIRECTORY).vocab_size
    assert tokenizer.vocabulary_size < vocab_size < tokenizer.vocabulary_size + 64
    assert vocab_size % 64 == 0


def test_added_tokens_have_the_ids_after_the_merges_and_their_flags(tokenizer: Tokenizer):
    first = tokenizer.vocabulary_size - len(ADDED_TOKENS)
    for place, (content, special) in enumerate(ADDED_TOKENS):
        assert tokenizer.encode(content) == [first + place]
        assert tokenizer.is_special(first + place) is special


def test_the_vocabulary_file_alone_lacks_the_last_seven_tokens():
    backend = tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    assert backend.token_to_id("</think>") is not None
    assert backend.token_to_id("<|audio_start|>") is None


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
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_merges_common_words_and_splits_digits(tokenizer: Tokenizer):
    assert len(tokenizer.encode(" the capital")) == 2
    assert len(tokenizer.encode("1024")) == 4


def test_each_file_that_an_engine_may_read_ends_an_answer(tokenizer: Tokenizer):
    end_of_turn, end_of_text = map(tokenizer.token_to_id, ("<|im_end|>", "<|endoftext|>"))
    assert tokenizer.eos_token_ids == (end_of_turn,)
    assert ModelConfig.from_file(DIRECTORY).eos_token_ids == (end_of_text, end_of_turn)
    generation = json.loads((DIRECTORY / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [end_of_turn, end_of_text]


def test_it_is_a_model_directory_like_any_other_and_never_written_to(tokenizer: Tokenizer):
    before = {path: path.stat().st_mtime_ns for path in (DIRECTORY, *DIRECTORY.iterdir())}
    named = load_engine(EngineConfig(model=str(DIRECTORY)))
    default = load_engine(EngineConfig())
    assert named.directory == default.directory == DIRECTORY
    assert default.model_name == "qwen3.5-tiny"
    for loaded in (named, default):
        engine = loaded.engine
        ends = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
        assert engine.stop_token_ids == ends
    after = {path: path.stat().st_mtime_ns for path in (DIRECTORY, *DIRECTORY.iterdir())}
    assert after == before


@pytest.mark.parametrize("lost", FILES)
def test_a_lost_file_is_one_line_that_names_it(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in FILES:
        if name != lost:
            (tmp_path / name).touch()
    monkeypatch.setattr(default_model, "default_model_files", lambda: tmp_path)
    with pytest.raises(CheckpointError, match="install qwen35-jax again") as raised:
        default_model_directory()
    message = str(raised.value)
    assert f"lacks {lost} in {tmp_path}" in message
    assert "\n" not in message


def test_a_package_inside_an_archive_is_one_line_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for name in FILES:
            archive.writestr(f"model/{name}", "")
        files = zipfile.Path(archive, "model/")
        monkeypatch.setattr(default_model, "default_model_files", lambda: files)
        with pytest.raises(CheckpointError, match=r"inside an archive .*as plain files"):
            default_model_directory()
