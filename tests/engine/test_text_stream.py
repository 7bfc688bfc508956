"""Text, stop strings and finishes of a request, the same however its ids arrive."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.engine.request import FinishReason, TokenLogprobs, TokenOutput
from qwen35_jax.engine.text_stream import TextDelta, TextStream
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import IncrementalDecoder, Tokenizer
from tests.support.tiny_tokenizer import ADDED_IDS, END_OF_TURN_ID, write_tiny_tokenizer

MULTILINGUAL = "ďábelské 🔥👩‍👩‍👧 你好 ไทย"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tiny_tokenizer")
    write_tiny_tokenizer(directory)
    return Tokenizer.from_directory(directory)


def output(
    ids: list[int],
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> TokenOutput:
    return TokenOutput(
        request_id="a",
        token_ids=tuple(ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        logprobs=logprobs,
    )


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    id_by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [id_by_byte[bytes([byte])] for byte in text.encode()]


def stream_texts(
    tokenizer: Tokenizer, ids: list[int], **params: Any
) -> tuple[list[str], TextStream, TextDelta]:
    """The texts of one push an id, up to a finish or to max_tokens."""
    stream = TextStream(tokenizer, SamplingParams(**params))
    texts, delta = [], TextDelta()
    for place, token_id in enumerate(ids):
        delta = stream.push(output([token_id], "length" if place == len(ids) - 1 else None))
        texts.append(delta.text)
        if stream.finished:
            break
    return texts, stream, delta


# Characters and finishes


def test_text_comes_in_whole_characters(tokenizer: Tokenizer):
    texts, stream, _ = stream_texts(tokenizer, bytewise(tokenizer, MULTILINGUAL))
    assert [text for text in texts if text] == list(MULTILINGUAL)
    assert stream.text == MULTILINGUAL


def test_length_inside_a_character_drops_its_start(tokenizer: Tokenizer):
    _, stream, delta = stream_texts(tokenizer, bytewise(tokenizer, "a🔥")[:-1])
    assert stream.text == "a"
    assert delta.finish_reason == "length"


@pytest.mark.parametrize("finish_reason", ["length", "abort", "error"])
def test_finish_from_outside_never_shows_half_a_character(
    tokenizer: Tokenizer, finish_reason: FinishReason
):
    stream = TextStream(tokenizer, SamplingParams())
    assert stream.push(output(bytewise(tokenizer, "é")[:1])).text == ""
    assert stream.push(output([], finish_reason)) == TextDelta(finish_reason=finish_reason)
    assert stream.finished


def test_stop_id_gives_no_text_and_stays_among_the_ids(tokenizer: Tokenizer):
    hello = tokenizer.encode("hello")
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=False))
    delta = stream.push(output([*hello, END_OF_TURN_ID], "stop", END_OF_TURN_ID))
    assert delta == TextDelta(
        text="hello",
        token_ids=(*hello, END_OF_TURN_ID),
        finish_reason="stop",
        stop_reason=END_OF_TURN_ID,
    )
    assert stream.text == "hello"
    assert stream.token_ids == [*hello, END_OF_TURN_ID]


def test_stop_id_that_is_ordinary_text_gives_no_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("hello world")
    stream = TextStream(tokenizer, SamplingParams(stop_token_ids=[ids[-1]]))
    assert stream.push(output(ids, "stop", ids[-1])).text == "hello"


def test_stop_id_after_half_a_character_shows_it_as_invalid(tokenizer: Tokenizer):
    stream = TextStream(tokenizer, SamplingParams())
    ids = [*bytewise(tokenizer, "aé")[:-1], END_OF_TURN_ID]
    assert stream.push(output(ids, "stop", END_OF_TURN_ID)).text == "a\ufffd"


@pytest.mark.parametrize(("skip", "text"), [(True, "<think>"), (False, "<|im_start|><think>")])
def test_special_tokens_are_shown_when_asked(tokenizer: Tokenizer, skip: bool, text: str):
    ids = [ADDED_IDS["<|im_start|>"], ADDED_IDS["<think>"]]
    _, stream, _ = stream_texts(tokenizer, ids, skip_special_tokens=skip)
    assert stream.text == text


def test_nothing_comes_after_a_finish(tokenizer: Tokenizer):
    stream = TextStream(tokenizer, SamplingParams(stop="b"))
    assert stream.push(output(tokenizer.encode("ab"))).stop_reason == "b"
    assert stream.push(output(tokenizer.encode("cd"), "abort")) == TextDelta()
    assert stream.text == "a"


# Stop strings


@pytest.mark.parametrize("stop", ["beta gamma", ["x", "beta gamma", "yy", "zz"]])
def test_stop_string_over_token_borders_ends_the_text_before_it(
    tokenizer: Tokenizer, stop: str | list[str]
):
    ids = bytewise(tokenizer, "alpha beta gamma delta")
    texts, stream, delta = stream_texts(tokenizer, ids, stop=stop)
    assert "".join(texts) == stream.text == "alpha "
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "beta gamma")
    assert stream.token_ids == ids[: len("alpha beta gamma")]


def test_false_start_is_held_back_and_released(tokenizer: Tokenizer):
    texts, stream, _ = stream_texts(
        tokenizer, bytewise(tokenizer, "a beta gable"), stop="beta gamma"
    )
    assert texts == ["a", " ", "", "", "", "", "", "", "", "beta ga", "bl", "e"]
    assert stream.text == "a beta gable"


@pytest.mark.parametrize("finish_reason", ["length", "abort", "error"])
def test_held_text_is_released_at_the_end(tokenizer: Tokenizer, finish_reason: FinishReason):
    stream = TextStream(tokenizer, SamplingParams(stop="beta gamma"))
    assert stream.push(output(bytewise(tokenizer, "a bet"))).text == "a "
    assert stream.push(output([], finish_reason)).text == "bet"
    assert stream.text == "a bet"


def test_held_text_is_released_by_a_stop_id(tokenizer: Tokenizer):
    stream = TextStream(tokenizer, SamplingParams(stop="beta gamma"))
    ids = [*bytewise(tokenizer, "bet"), END_OF_TURN_ID]
    assert stream.push(output(ids, "stop", END_OF_TURN_ID)).text == "bet"


def test_overlapping_false_start_still_finds_the_stop(tokenizer: Tokenizer):
    _, stream, delta = stream_texts(tokenizer, bytewise(tokenizer, "xaaaab"), stop="aab")
    assert stream.text == "xaa"
    assert delta.stop_reason == "aab"


def test_stop_that_ends_first_wins_over_one_that_starts_first(tokenizer: Tokenizer):
    _, stream, delta = stream_texts(tokenizer, bytewise(tokenizer, "abcd"), stop=["abcd", "bc"])
    assert (stream.text, delta.stop_reason) == ("a", "bc")


def test_stop_that_ends_first_wins_inside_one_token_too(tokenizer: Tokenizer):
    hello = tokenizer.encode("hello")
    assert len(hello) == 1
    _, stream, delta = stream_texts(tokenizer, hello, stop=["hello", "el"])
    assert (stream.text, delta.stop_reason) == ("h", "el")


def test_longest_of_two_stops_with_one_end_wins(tokenizer: Tokenizer):
    _, stream, delta = stream_texts(tokenizer, bytewise(tokenizer, "abcd"), stop=["c", "abc", "bc"])
    assert (stream.text, delta.stop_reason) == ("", "abc")


def test_stop_string_inside_a_push_cuts_ids_and_logprobs(tokenizer: Tokenizer):
    ids = bytewise(tokenizer, "abcd")
    logprobs = tuple(TokenLogprobs(token=-float(place), top=()) for place in range(4))
    stream = TextStream(tokenizer, SamplingParams(stop="b", logprobs=0))
    delta = stream.push(output(ids, "length", logprobs=logprobs))
    assert delta == TextDelta(
        text="a",
        token_ids=tuple(ids[:2]),
        logprobs=logprobs[:2],
        finish_reason="stop",
        stop_reason="b",
    )


def test_stop_string_before_a_stop_id_in_one_push_wins(tokenizer: Tokenizer):
    ids = bytewise(tokenizer, "ab")
    stream = TextStream(tokenizer, SamplingParams(stop="b"))
    delta = stream.push(output([*ids, END_OF_TURN_ID], "stop", END_OF_TURN_ID))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("a", tuple(ids), "b")


def test_stop_string_inside_a_token_ends_the_text_inside_it(tokenizer: Tokenizer):
    _, stream, _ = stream_texts(tokenizer, tokenizer.encode("hello world"), stop="lo w")
    assert stream.text == "hel"


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, ""), (1, "abcd"), (2, "abcd"), (4, "abcd"), (5, "abcdabcd"), (6, "abcdabcd")],
)
def test_stop_string_is_looked_for_in_what_comes_after_min_tokens(
    tokenizer: Tokenizer, min_tokens: int, text: str
):
    ids = bytewise(tokenizer, "abcdabcd")
    _, stream, delta = stream_texts(tokenizer, ids, stop="ab", min_tokens=min_tokens)
    assert stream.text == text
    assert delta.finish_reason == ("length" if text == "abcdabcd" else "stop")
    # Nor does it matter how the ids come.
    whole = TextStream(tokenizer, SamplingParams(stop="ab", min_tokens=min_tokens))
    assert whole.push(output(ids, "length")).text == text


def test_stop_string_of_split_characters_is_found(tokenizer: Tokenizer):
    _, stream, delta = stream_texts(tokenizer, bytewise(tokenizer, MULTILINGUAL), stop="👧 你")
    assert stream.text == MULTILINGUAL[: MULTILINGUAL.index("👧")]
    assert delta.stop_reason == "👧 你"


def known_id(tokenizer: Tokenizer, spelling: str) -> int:
    token_id = tokenizer.token_to_id(spelling)
    assert token_id is not None
    return token_id


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The textbook: the first end of any stop string in the whole text, the longest there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


# Few letters and the bytes of one character, so that stop strings come and nearly come.
stop_texts = st.one_of(
    st.text(alphabet="abé", min_size=1, max_size=4),
    st.sampled_from(["\ufffd", "el", "hello", "lohe", "ahel"]),
)
pieces = st.sampled_from(["a", "b", "Ã", "©", "Ã©", "Â", "an", "hello", "<|im_start|>"])


@given(
    spellings=st.lists(pieces, max_size=24),
    stops=st.lists(stop_texts, max_size=4),
    cuts=st.sets(st.integers(0, 24)),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
)
def test_any_split_gives_the_textbook_text(
    tokenizer: Tokenizer,
    spellings: list[str],
    stops: list[str],
    cuts: set[int],
    finish_reason: FinishReason,
):
    text_ids = [known_id(tokenizer, spelling) for spelling in spellings]
    ended_by_id = finish_reason == "stop"
    stop_id = END_OF_TURN_ID if ended_by_id else None
    ids = [*text_ids, END_OF_TURN_ID] if ended_by_id else text_ids

    # The ids that make each prefix of the text, by the length that the text then has.
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    text, lengths = "", []
    for token_id in text_ids:
        text += decoder.push([token_id])
        lengths.append(len(text))
    text += decoder.finish(cut=not ended_by_id)
    found = first_stop(text, stops)
    if found is None:
        expected = (text, ids, finish_reason, stop_id)
    else:
        end, stop = found
        used = next((n for n, length in enumerate(lengths, start=1) if length >= end), len(ids))
        expected = (text[: end - len(stop)], ids[:used], "stop", stop)

    for borders in ([], sorted(cut for cut in cuts if cut < len(ids)), list(range(len(ids)))):
        stream = TextStream(tokenizer, SamplingParams(stop=stops))
        deltas = []
        for start, stop_place in zip([0, *borders], [*borders, len(ids)], strict=True):
            last = stop_place == len(ids)
            pushed = output(
                ids[start:stop_place], finish_reason if last else None, stop_id if last else None
            )
            deltas.append(stream.push(pushed))
        ends = [delta for delta in deltas if delta.finish_reason is not None]
        assert len(ends) == 1
        assert stream.finished
        assert "".join(delta.text for delta in deltas) == stream.text
        assert (stream.text, stream.token_ids, ends[0].finish_reason, ends[0].stop_reason) == (
            expected
        )
