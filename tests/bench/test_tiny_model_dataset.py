"""Conversations as arrays: exact prompts, weights on the right tokens, every one once an epoch."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from bench.tiny_model.dataset import (
    EXAMPLES_PER_CHUNK,
    ROW_LENGTHS,
    Conversations,
    batch_shapes,
    batches,
    encode_example,
    load_conversations,
    main,
    make_conversations,
    render_prompt,
    save_conversations,
)
from bench.tiny_model.make_tokenizer import write_tokenizer
from bench.tiny_model.tasks import SKILLS, held_out_set, stream
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.tokenizer import Tokenizer

TEMPLATE = ChatTemplate.built_in()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def conversations(directory: Path) -> Conversations:
    return make_conversations(
        EXAMPLES_PER_CHUNK + 200, tokenizer_directory=directory, seed=3, progress=False
    )


def row(conversations: Conversations, place: int) -> list[int]:
    start, end = conversations.offsets[place : place + 2]
    return conversations.ids[start:end].tolist()


def test_prompt_and_target_are_the_conversation_that_the_template_renders():
    for example in held_out_set(8, seed=1):
        reasoning, content = "", example["target"]
        if example["enable_thinking"]:
            reasoning, _, content = content.partition("\n</think>\n\n")
        reply = {"role": "assistant", "reasoning_content": reasoning, "content": content}
        if example["answer"]["kind"] == "tool_call":
            call = {key: example["answer"][key] for key in ("name", "arguments")}
            reply |= {"content": "", "tool_calls": [{"function": call}]}
        whole = TEMPLATE.render(
            [*example["messages"], reply], tools=example["tools"], add_generation_prompt=False
        )
        prompt = render_prompt(example, TEMPLATE)
        assert prompt + example["target"] + "<|im_end|>\n" == whole
        assert prompt.endswith(
            "<think>\n" if example["enable_thinking"] else "<think>\n\n</think>\n\n"
        )


def test_no_token_spans_the_border_of_prompt_and_target(tokenizer: Tokenizer):
    for example in held_out_set(8, seed=2):
        ids, prompt_length = encode_example(example, TEMPLATE, tokenizer)
        prompt = render_prompt(example, TEMPLATE)
        assert ids == tokenizer.encode(prompt + example["target"] + "<|im_end|>\n")
        assert tokenizer.decode(ids[:prompt_length], skip_special_tokens=False) == prompt


def test_conversations_are_short(tokenizer: Tokenizer):
    for skill in SKILLS:
        lengths = [
            len(encode_example(example, TEMPLATE, tokenizer)[0])
            for example in held_out_set(40, seed=4)
            if example["skill"] == skill
        ]
        assert max(lengths) <= ROW_LENGTHS[-1], skill
        assert np.mean(lengths) < (350 if skill.startswith("tool") else 160), skill


def test_the_arrays_hold_the_stream_of_each_chunk(
    conversations: Conversations, tokenizer: Tokenizer
):
    assert len(conversations) == EXAMPLES_PER_CHUNK + 200
    assert conversations.offsets[-1] == len(conversations.ids)
    for chunk in (0, 1):
        for place, example in enumerate(islice(stream("train", f"3:{chunk}"), 30)):
            place += chunk * EXAMPLES_PER_CHUNK
            ids, prompt_length = encode_example(example, TEMPLATE, tokenizer)
            assert row(conversations, place) == ids
            assert conversations.prompt_lengths[place] == prompt_length
            skill = conversations.skill_names[conversations.skills[place]]
            assert skill == example["skill"]


def test_the_number_of_workers_changes_nothing(conversations: Conversations, directory: Path):
    again = make_conversations(
        len(conversations), tokenizer_directory=directory, seed=3, workers=2, progress=False
    )
    for name, value in vars(conversations).items():
        np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)


def test_what_is_saved_is_loaded(conversations: Conversations, tmp_path: Path):
    path = tmp_path / "new" / "train.data"
    save_conversations(path, conversations)
    loaded = load_conversations(path)
    for name, value in vars(conversations).items():
        np.testing.assert_array_equal(getattr(loaded, name), value, err_msg=name)
        assert type(getattr(loaded, name)) is type(value)


def test_batches_have_few_shapes_of_about_as_many_tokens(conversations: Conversations):
    shapes = batch_shapes(1024)
    assert shapes == [(16, 64), (8, 128), (2, 384)]
    for batch in islice(batches(conversations, tokens_per_batch=1024), 60):
        assert batch.ids.shape == batch.mask.shape
        assert batch.ids.shape in shapes
        assert (batch.ids.dtype, batch.mask.dtype) == (np.int32, np.float32)
    assert batch_shapes(100)[-1] == (1, 384)


def test_the_weights_are_on_the_reply_and_its_end(
    conversations: Conversations, tokenizer: Tokenizer
):
    for batch in islice(batches(conversations, tokens_per_batch=2048, prompt_weight=0.25), 20):
        for ids, mask in zip(batch.ids, batch.mask, strict=True):
            assert mask[0] == 0
            count = int(mask.nonzero()[0][-1]) + 1
            assert set(ids[count:].tolist()) <= {conversations.padding_id}
            assert set(mask.tolist()) <= {0.0, 0.25, 1.0}
            text = tokenizer.decode(ids[mask == 1.0].tolist(), skip_special_tokens=False)
            whole = tokenizer.decode(ids[:count].tolist(), skip_special_tokens=False)
            assert whole.endswith(text + "\n")
            assert text.count("<|im_end|>") == 1
            assert text.endswith("<|im_end|>")
            assert whole[: -len(text) - 1].endswith(("<think>\n", "</think>\n\n"))


def test_an_epoch_has_every_conversation_once_and_the_next_in_another_order(
    conversations: Conversations,
):
    # One row a batch: nothing waits for the next epoch.
    drawn = batches(conversations, tokens_per_batch=1, seed=1)
    epochs = [[_key(batch.ids) for batch in islice(drawn, len(conversations))] for _ in range(2)]
    everything = sorted(tuple(row(conversations, place)) for place in range(len(conversations)))
    assert sorted(_without_padding(key, conversations) for key in epochs[0]) == everything
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_batches_are_the_same_for_a_seed(conversations: Conversations):
    def first_ids(seed: int) -> list[tuple[int, ...]]:
        drawn = batches(conversations, tokens_per_batch=512, seed=seed)
        return [_key(batch.ids) for batch in islice(drawn, 5)]

    assert first_ids(1) == first_ids(1)
    assert first_ids(1) != first_ids(2)


def test_a_conversation_longer_than_a_row_is_refused(conversations: Conversations):
    count = ROW_LENGTHS[-1] + 1
    long = Conversations(
        **{
            **vars(conversations),
            "ids": np.zeros(count, np.uint16),
            "offsets": np.array([0, count]),
            "prompt_lengths": np.array([5]),
        }
    )
    with pytest.raises(ValueError, match=f"the longest has {count}"):
        next(batches(long, tokens_per_batch=512))


def test_the_command_writes_a_file_that_loads(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.npz"
    options = ["--examples", "20", "--workers", "1", "--tokenizer", str(directory)]
    assert main([*options, "--seed", "7", "--out", str(path)]) == 0
    assert len(load_conversations(path)) == 20
    assert "20 conversations" in capsys.readouterr().out


def _key(ids: np.ndarray) -> tuple[int, ...]:
    return tuple(ids.ravel().tolist())


def _without_padding(ids: tuple[int, ...], conversations: Conversations) -> tuple[int, ...]:
    return tuple(token_id for token_id in ids if token_id != conversations.padding_id)
