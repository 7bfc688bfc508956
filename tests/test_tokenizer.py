"""The tokenizer against the `tokenizers` library, on the tiny vocabulary and on the real one."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.errors import InvalidRequestError, TokenizerError
from qwen35_jax.tokenizer import IncrementalDecoder, Tokenizer
from tests.support.tiny_tokenizer import (
    ADDED_IDS,
    ADDED_TOKENS,
    END_OF_TURN_ID,
    FIRST_ADDED_ID,
    VOCABULARY_SIZE,
    tokenizer_config_json,
    tokenizer_json,
    write_tiny_tokenizer,
)

REAL_DIRECTORY = Path(__file__).resolve().parents[2] / "shared" / "qwen35" / "tokenizer"
MULTILINGUAL = "ďábelské 🔥👩‍👩‍👧 你好 ไทย"

token_ids = st.integers(0, VOCABULARY_SIZE - 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_tokenizer")
    write_tiny_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def library(directory: Path) -> tokenizers.Tokenizer:
    """The library itself on the same files, with the added tokens that only the config lists."""
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens(
        [
            tokenizers.AddedToken(text, special=special, normalized=False)
            for text, special in ADDED_TOKENS
        ]
    )
    return backend


@pytest.fixture(scope="module")
def real_tokenizer() -> Tokenizer:
    if not REAL_DIRECTORY.is_dir():
        pytest.skip("the real vocabulary does not lie beside the repository")
    return Tokenizer.from_directory(REAL_DIRECTORY)


def character_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id a byte, so that characters lie across ids."""
    id_by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [id_by_byte[bytes([byte])] for byte in text.encode()]


def write_files(
    directory: Path,
    *,
    vocabulary: Callable[[dict[str, Any]], object] = lambda _: None,
    config: Callable[[dict[str, Any]], object] = lambda _: None,
) -> Path:
    """Tiny files after a change to each."""
    for name, content, change in (
        ("tokenizer.json", tokenizer_json(), vocabulary),
        ("tokenizer_config.json", tokenizer_config_json(), config),
    ):
        change(content)
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


# Loading


def test_tokens_only_the_config_lists_are_added_at_their_ids(tokenizer: Tokenizer):
    assert tokenizer.vocabulary_size == VOCABULARY_SIZE == 320
    assert {text: tokenizer.token_to_id(text) for text, _ in ADDED_TOKENS} == ADDED_IDS
    assert tokenizer.encode("a<|audio_pad|>") == [tokenizer.token_to_id("a"), 319]


def test_special_flags_are_those_of_the_files(tokenizer: Tokenizer):
    flags = [(text, tokenizer.is_special(ADDED_IDS[text])) for text, _ in ADDED_TOKENS]
    assert flags == list(ADDED_TOKENS)
    assert not tokenizer.is_special(0)
    assert not tokenizer.is_special(VOCABULARY_SIZE)


@pytest.mark.parametrize(
    ("eos_token", "expected"),
    [
        ("<|im_end|>", (END_OF_TURN_ID,)),
        ({"content": "<|im_end|>", "special": True}, (END_OF_TURN_ID,)),
        (None, ()),
    ],
)
def test_eos_token_is_a_string_an_object_or_null(
    tmp_path: Path, eos_token: object, expected: tuple[int, ...]
):
    write_files(tmp_path, config=lambda config: config.update(eos_token=eos_token))
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    "eos_token", ["<|nowhere|>", "\ud800", {"content": "\ud800"}, 5, ["<|im_end|>"], {}]
)
def test_eos_token_outside_the_vocabulary_is_refused(tmp_path: Path, eos_token: object):
    write_files(tmp_path, config=lambda config: config.update(eos_token=eos_token))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: eos_token .* not in the"):
        Tokenizer.from_directory(tmp_path)


def test_added_token_that_would_get_another_id_is_refused(tmp_path: Path):
    def leave_a_gap(config: dict[str, Any]) -> None:
        entry = config["added_tokens_decoder"].pop("319")
        config["added_tokens_decoder"]["400"] = entry

    write_files(tmp_path, config=leave_a_gap)
    with pytest.raises(
        TokenizerError,
        match=r"tokenizer_config\.json: added token '<\|audio_pad\|>' should have id 400, but "
        r"tokenizer\.json makes it 319",
    ):
        Tokenizer.from_directory(tmp_path)


def test_added_token_spelled_differently_in_the_two_files_is_refused(tmp_path: Path):
    def respell(config: dict[str, Any]) -> None:
        config["added_tokens_decoder"][str(FIRST_ADDED_ID)]["content"] = "<|other|>"

    write_files(tmp_path, config=respell)
    with pytest.raises(TokenizerError, match=r"added token '<\|other\|>' should have id 287"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"x": {"content": "y"}},
        {"290": {}},
        {"290": "<a>"},
        {"290": {"content": "\ud800"}},
        {"9" * 5000: {"content": "y"}},
    ],
)
def test_malformed_added_tokens_are_refused(tmp_path: Path, entries: object):
    write_files(tmp_path, config=lambda config: config.update(added_tokens_decoder=entries))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer.from_directory(tmp_path)


def test_config_without_added_tokens_leaves_the_vocabulary_as_it_is(tmp_path: Path):
    write_files(tmp_path, config=lambda config: config.pop("added_tokens_decoder"))
    assert Tokenizer.from_directory(tmp_path).vocabulary_size == VOCABULARY_SIZE - 7


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b"\x00" * 40])
def test_missing_or_corrupt_file_is_one_line_that_names_it(
    tmp_path: Path, name: str, content: bytes | None
):
    write_files(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_directory(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / name) in message
    assert "\n" not in message


def test_decoder_that_is_not_byte_level_is_refused_by_name(tmp_path: Path):
    decoder = {"type": "BPEDecoder", "suffix": ""}
    write_files(tmp_path, vocabulary=lambda vocabulary: vocabulary.update(decoder=decoder))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: decoder BPEDecoder is not"):
        Tokenizer.from_directory(tmp_path)


def test_saved_truncation_and_padding_do_not_change_prompts(tmp_path: Path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    write_files(
        tmp_path,
        vocabulary=lambda vocabulary: vocabulary.update(truncation=truncation, padding=padding),
    )
    assert len(Tokenizer.from_directory(tmp_path).encode("xyzxyz")) == 6


# Text to ids


def test_encode_adds_nothing_and_reads_spelled_out_added_tokens(tokenizer: Tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<|im_start|>hello<|im_end|>") == [
        ADDED_IDS["<|im_start|>"],
        tokenizer.token_to_id("hello"),
        ADDED_IDS["<|im_end|>"],
    ]


def test_encode_splits_digits_and_normalises_to_composed_characters(tokenizer: Tokenizer):
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9") == [FIRST_ADDED_ID - 1]


@pytest.mark.parametrize(("text", "place"), [("ab\ud83d", 2), ("\udc00", 0)])
def test_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer, text: str, place: int):
    with pytest.raises(InvalidRequestError, match=f"lone surrogate .* at character {place}"):
        tokenizer.encode(text)


def test_encoding_lets_other_threads_run(tokenizer: Tokenizer):
    text = "hello world 2024 " * 60_000
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(tokenizer.encode, text)
        ticks = 0
        while not encoding.done():
            time.sleep(0.001)
            ticks += 1
    assert ticks > 10


@pytest.mark.parametrize(
    "text", ["<tts_text_bos_single>", "e\u0301", "\u1112\u1161\u11ab", "\u2126\u0313\u0300\u0345"]
)
def test_no_token_stands_for_more_bytes_than_the_longest(tokenizer: Tokenizer, text: str):
    # The longest is <tts_text_bos_single>, times three for what NFC may take away.
    assert tokenizer.longest_token_bytes == 63
    assert len(text.encode()) <= 63 * len(tokenizer.encode(text))


def test_there_is_no_longest_token_where_one_takes_white_space_along(tmp_path: Path):
    def strip(config: dict[str, Any]) -> None:
        config["added_tokens_decoder"]["319"]["lstrip"] = True

    write_files(tmp_path, config=strip)
    assert Tokenizer.from_directory(tmp_path).longest_token_bytes is None


@pytest.mark.parametrize(("normalizer", "expected"), [(None, 21), ({"type": "Lowercase"}, None)])
def test_the_longest_token_depends_on_what_normalising_takes_away(
    tmp_path: Path, normalizer: object, expected: int | None
):
    write_files(tmp_path, vocabulary=lambda vocabulary: vocabulary.update(normalizer=normalizer))
    assert Tokenizer.from_directory(tmp_path).longest_token_bytes == expected


# Ids to text


def test_token_bytes_undo_the_byte_alphabet(tokenizer: Tokenizer):
    assert {tokenizer.token_bytes(token_id) for token_id in range(256)} == {
        bytes([byte]) for byte in range(256)
    }
    world_id = tokenizer.token_to_id("Ġworld")
    assert world_id is not None
    assert tokenizer.token_bytes(world_id) == b" world"
    assert tokenizer.token_bytes(ADDED_IDS["<think>"]) == b"<think>"


def test_added_token_is_its_own_utf8_even_in_the_byte_alphabet(tmp_path: Path):
    def add_letter(config: dict[str, Any]) -> None:
        config["added_tokens_decoder"]["320"] = {"content": "Ġé", "special": False}

    write_files(tmp_path, config=add_letter)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.token_bytes(320) == "Ġé".encode()
    assert tokenizer.decode([320]) == "Ġé"


def test_skip_special_tokens_keeps_think_and_tool_tags(tokenizer: Tokenizer):
    ids = tokenizer.encode("<think>a</think><tool_call><|im_end|>")
    assert tokenizer.decode(ids) == "<think>a</think><tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<think>a</think><tool_call><|im_end|>"
    )


@given(st.text())
def test_round_trip_is_the_composed_text(tokenizer: Tokenizer, text: str):
    composed = tokenizers.normalizers.NFC().normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == composed


@given(st.lists(token_ids), st.booleans())
def test_decode_equals_the_library_on_any_ids(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, ids: list[int], skip: bool
):
    expected = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(st.lists(st.lists(token_ids, max_size=4)), st.booleans())
def test_pushes_concatenate_to_decode(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    text = "".join(decoder.push(ids) for ids in pushes) + decoder.finish(cut=False)
    assert text == tokenizer.decode(chain(*pushes), skip_special_tokens=skip)


def test_stream_of_split_characters_has_no_replacement_character(tokenizer: Tokenizer):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    texts = [decoder.push([token_id]) for token_id in character_ids(tokenizer, MULTILINGUAL)]
    assert [text for text in texts if text] == list(MULTILINGUAL)
    assert decoder.finish(cut=False) == ""


@pytest.mark.parametrize(("cut", "rest"), [(True, ""), (False, "\ufffd")])
def test_unfinished_character_is_dropped_when_cut_and_replaced_otherwise(
    tokenizer: Tokenizer, cut: bool, rest: str
):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    assert decoder.push(character_ids(tokenizer, "a🔥")[:-1]) == "a"
    assert decoder.finish(cut=cut) == rest


def test_invalid_bytes_are_replaced_only_where_they_are_invalid(tokenizer: Tokenizer):
    lone_continuation = character_ids(tokenizer, "é")[1:]
    ids = [
        *character_ids(tokenizer, "é"),
        *lone_continuation,
        *character_ids(tokenizer, "🔥")[:2],
        *character_ids(tokenizer, "z你"),
    ]
    assert tokenizer.decode(ids) == "é\ufffd\ufffdz你"


def test_skipped_special_token_does_not_break_a_character(tokenizer: Tokenizer):
    first, second = character_ids(tokenizer, "é")
    assert tokenizer.decode([first, END_OF_TURN_ID, second]) == "é"


@pytest.mark.parametrize("token_id", [VOCABULARY_SIZE, -1, 10**30])
def test_id_outside_the_vocabulary_is_refused_and_takes_nothing(
    tokenizer: Tokenizer, token_id: int
):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    with pytest.raises(InvalidRequestError, match=rf"token id {token_id} is not in the vocabulary"):
        decoder.push([0, token_id])
    assert decoder.push([1]) + decoder.finish(cut=False) == tokenizer.decode([1])


def test_hole_in_the_ids_is_outside_the_vocabulary(tmp_path: Path):
    write_files(
        tmp_path, vocabulary=lambda vocabulary: vocabulary["model"]["vocab"].update({"!": 1000})
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocabulary_size == 1001
    for token_id in (0, 500):
        with pytest.raises(InvalidRequestError, match=f"token id {token_id} is not in the"):
            tokenizer.token_bytes(token_id)


# The real vocabulary


def test_real_vocabulary_has_the_published_size_and_end_of_turn(real_tokenizer: Tokenizer):
    assert real_tokenizer.vocabulary_size == 248_077
    assert real_tokenizer.eos_token_ids == (248_046,)
    assert real_tokenizer.token_to_id("<|endoftext|>") == 248_044
    assert real_tokenizer.token_to_id("<|audio_pad|>") == 248_076
    assert [
        real_tokenizer.is_special(token_id) for token_id in (248_046, 248_058, 248_069, 248_076)
    ] == [True, False, False, True]


def test_real_vocabulary_gives_the_published_ids(real_tokenizer: Tokenizer):
    assert real_tokenizer.encode("The capital of France is") == [760, 6511, 314, 9338, 369]


@pytest.mark.parametrize(
    ("enable_thinking", "tail"),
    [(None, [248_068, 198]), (True, [248_068, 198]), (False, [248_068, 271, 248_069, 271])],
)
def test_real_vocabulary_gives_the_published_chat_ids(
    real_tokenizer: Tokenizer, enable_thinking: bool | None, tail: list[int]
):
    prompt = ChatTemplate.built_in().render(
        [{"role": "user", "content": "hi"}], enable_thinking=enable_thinking
    )
    turns = [248_045, 846, 198, 5834, 248_046, 198, 248_045, 74_455, 198]
    assert real_tokenizer.encode(prompt) == turns + tail


def test_real_vocabulary_streams_multilingual_text_whole(real_tokenizer: Tokenizer):
    ids = real_tokenizer.encode(MULTILINGUAL)
    decoder = IncrementalDecoder(real_tokenizer, skip_special_tokens=True)
    texts = [decoder.push([token_id]) for token_id in ids]
    assert "".join(texts) == real_tokenizer.decode(ids) == MULTILINGUAL
    assert not any("\ufffd" in text for text in texts)
