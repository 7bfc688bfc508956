"""Log-probabilities as completions give them."""

import math

from qwen35_jax.engine.request import TokenLogprobs
from qwen35_jax.tokenizer import Tokenizer
from serve.logprobs import LOWEST_LOGPROB, LogprobsWriter, token_text


def test_part_of_a_character_is_written_as_bytes(tokenizer: Tokenizer):
    ids = tokenizer.encode("你")
    assert [token_text(tokenizer, token_id) for token_id in ids] == [
        "bytes:\\xe4",
        "bytes:\\xbd",
        "bytes:\\xa0",
    ]


def test_offsets_count_whole_characters_and_go_on_from_call_to_call(tokenizer: Tokenizer):
    writer = LogprobsWriter(tokenizer, skip_special_tokens=True)
    offsets = [
        writer.write([token_id], [TokenLogprobs(-1.0, ())]).text_offset
        for token_id in tokenizer.encode("a<|im_end|>你hello b")
    ]
    assert offsets == [[0], [1], [1], [1], [1], [2], [7]]


def test_the_chosen_token_is_among_the_top_ones_with_its_own_number(tokenizer: Tokenizer):
    writer = LogprobsWriter(tokenizer, skip_special_tokens=True)
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    written = writer.write(
        [a, b, c],
        [
            TokenLogprobs(-3.0, ()),
            TokenLogprobs(-3.0, ((a, -0.1),)),
            TokenLogprobs(-0.25, ((c, -0.2500001), (a, -2.0))),
        ],
    )
    assert written.tokens == ["a", "b", "c"]
    assert written.token_logprobs == [-3.0, -3.0, -0.25]
    assert written.top_logprobs == [{"a": -3.0}, {"a": -0.1, "b": -3.0}, {"c": -0.25, "a": -2.0}]


def test_minus_infinity_becomes_a_number(tokenizer: Tokenizer):
    writer = LogprobsWriter(tokenizer, skip_special_tokens=True)
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    written = writer.write([a], [TokenLogprobs(-math.inf, ((b, -math.inf),))])
    assert written.token_logprobs == [LOWEST_LOGPROB]
    assert written.top_logprobs == [{"b": LOWEST_LOGPROB, "a": LOWEST_LOGPROB}]
