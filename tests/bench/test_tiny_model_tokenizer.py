"""The tiny model's tokenizer: the published layout, small, and letters where letters matter."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bench.tiny_model.fact_tasks import FACTS, fill, known_countries
from bench.tiny_model.make_tokenizer import NUM_BYTE_AND_MERGED_TOKENS, main, training_texts
from bench.tiny_model.tokenizer_recipe import (
    ADDED_TOKENS,
    NUM_ADDED_IN_VOCABULARY_FILE,
    train_tokenizer,
)
from qwen35_jax.default_model import default_model_files
from qwen35_jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "new"
    assert main(["--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


def test_training_again_gives_the_same_file(directory: Path):
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    assert (
        text
        == train_tokenizer(training_texts(), NUM_BYTE_AND_MERGED_TOKENS).to_str(pretty=True) + "\n"
    )


def test_the_added_tokens_follow_the_vocabulary_in_order(directory: Path, tokenizer: Tokenizer):
    assert len(ADDED_TOKENS) == 33
    assert tokenizer.vocabulary_size == NUM_BYTE_AND_MERGED_TOKENS + len(ADDED_TOKENS)
    for place, (text, special) in enumerate(ADDED_TOKENS):
        token_id = NUM_BYTE_AND_MERGED_TOKENS + place
        assert tokenizer.encode(text) == [token_id]
        assert tokenizer.is_special(token_id) == special
    in_file = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert len(in_file.get_added_tokens_decoder()) == NUM_ADDED_IN_VOCABULARY_FILE
    assert in_file.token_to_id("</think>") == in_file.get_vocab_size() - 1
    assert tokenizer.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)


def test_a_text_ends_at_the_end_of_its_turn_and_at_its_own(directory: Path, tokenizer: Tokenizer):
    config = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    end_of_turn, end_of_text = map(tokenizer.token_to_id, ("<|im_end|>", "<|endoftext|>"))
    assert config == {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}


def test_the_chat_template_is_the_embedded_models(directory: Path):
    asset = default_model_files() / "chat_template.jinja"
    assert (directory / "chat_template.jinja").read_bytes() == asset.read_bytes()


# Surrogates aren't text, and NFC would change what it composes.
@given(st.text(st.characters(exclude_categories=["Cs", "Mn"], max_codepoint=0x2FF)))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str):
    import unicodedata

    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_text_of_other_scripts_comes_back(tokenizer: Tokenizer):
    for text in ("你好 ไทย 🔥👩‍👩‍👧 ďábelské", "tab\there\r\n\n  two  spaces ", "हिन्दी", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_capitals_are_tokens_of_their_own(tokenizer: Tokenizer):
    assert pieces(tokenizer, "1234+5") == ["1", "2", "3", "4", "+", "5"]
    assert pieces(tokenizer, " YRREBWARTS") == [" Y", *"RREBWARTS"]
    assert pieces(tokenizer, "(EUR)") == ["(", *"EUR", ")"]


def test_spelled_letters_are_tokens(tokenizer: Tokenizer):
    spelled = " a b c d e f g h i j k l m n o p q r s t u v w x y z"
    assert pieces(tokenizer, spelled) == [f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


def test_facts_take_few_tokens(tokenizer: Tokenizer):
    lengths = [
        len(tokenizer.encode(fill(fact.reply, fact.subject(country), fact.value(country) or "")))
        for fact in FACTS
        for country in known_countries(fact)
    ]
    assert sum(lengths) / len(lengths) < 12
    assert max(lengths) <= 30
