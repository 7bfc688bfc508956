"""Conversations as token arrays: made in all processes, kept in one .npz, served as batches.

    python -m bench.tiny_model.dataset --examples 300000 --seed 0 --out FILE

A row of a batch is one conversation with padding on its right: the recurrent state of the delta
layers starts fresh at a row's start and nowhere else. Rows are of a few lengths only, so that a
training step compiles once for each.
"""

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.tiny_model.checks import END_OF_TURN
from bench.tiny_model.example import Example, Split
from bench.tiny_model.make_tokenizer import write_tokenizer
from bench.tiny_model.tasks import SKILLS, stream
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.tokenizer import Tokenizer

ROW_LENGTHS = (64, 128, 384)
PROMPT_WEIGHT = 0.1
PADDING_TOKEN = "<|endoftext|>"
# A chunk's examples hang on its number alone: any number of processes makes the same data.
EXAMPLES_PER_CHUNK = 1000


@dataclass(frozen=True)
class Conversations:
    """Encoded conversations, one after another.

    ids: [tokens] uint16. offsets: [N + 1] int64, where each conversation starts and ends.
    prompt_lengths: [N] int32, how many of its tokens are the prompt; the rest are the assistant's
        turn, <|im_end|> and a line break. skills: [N] uint8, places in skill_names.
    padding_id: what fills the rest of a row. vocabulary_size: highest id + 1.
    """

    ids: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    skills: np.ndarray
    skill_names: tuple[str, ...]
    padding_id: int
    vocabulary_size: int

    def __len__(self) -> int:
        return len(self.prompt_lengths)


@dataclass(frozen=True)
class Batch:
    """ids: [B, T] int32, padded on the right. mask: [B, T] float32, the weight of each id as a
    label: the loss at position t predicts ids[:, t + 1] and is weighted by mask[:, t + 1].

    A padding id and the first id of a row weigh nothing.
    """

    ids: np.ndarray
    mask: np.ndarray


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.tiny_model.dataset", description="Make training conversations."
    )
    parser.add_argument("--examples", type=int, default=300_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .npz to write")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIRECTORY", help="default: trained anew, in seconds"
    )
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.tokenizer
        if directory is None:
            directory = Path(temporary)
            write_tokenizer(directory)
        conversations = make_conversations(
            arguments.examples,
            tokenizer_directory=directory,
            split=arguments.split,
            seed=arguments.seed,
            workers=arguments.workers,
        )
    save_conversations(arguments.out, conversations)
    print(
        f"{arguments.out}: {len(conversations)} conversations, {len(conversations.ids)} tokens, "
        f"longest {int(np.diff(conversations.offsets).max())}"
    )
    return 0


def encode_example(
    example: Example, template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[list[int], int]:
    """(ids of prompt, target, <|im_end|> and a line break; how many of them are the prompt)."""
    prompt = tokenizer.encode(render_prompt(example, template))
    # Apart from the prompt, as it is when the model is served: no token spans the border.
    reply = tokenizer.encode(example["target"] + END_OF_TURN + "\n")
    return prompt + reply, len(prompt)


def render_prompt(example: Example, template: ChatTemplate) -> str:
    """The example's prompt, with the generation prompt at its end."""
    return template.render(
        example["messages"],
        tools=example["tools"] or None,
        enable_thinking=example["enable_thinking"],
    )


def make_conversations(
    count: int,
    *,
    tokenizer_directory: Path,
    split: Split = "train",
    seed: int = 0,
    workers: int = 1,
    progress: bool = True,
) -> Conversations:
    """`count` conversations of the mixture: the same for the same seed, however many workers."""
    sizes = [
        min(EXAMPLES_PER_CHUNK, count - first) for first in range(0, count, EXAMPLES_PER_CHUNK)
    ]
    directory = str(tokenizer_directory)
    with (
        tqdm(total=count, unit="example", desc="examples", disable=not progress) as bar,
        # Not fork, which would copy the locks of the tokenizer's threads.
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        places = range(len(sizes))
        settings = ([value] * len(sizes) for value in (directory, split, seed))
        chunks = []
        for chunk in pool.map(_encoded_chunk, *settings, places, sizes):
            chunks.append(chunk)
            bar.update(len(chunk[1]))
    ids, lengths, prompt_lengths, skills = (
        np.concatenate(parts) for parts in zip(*chunks, strict=True)
    )
    _, tokenizer = _tools(directory)
    padding_id = tokenizer.token_to_id(PADDING_TOKEN)
    assert padding_id is not None
    return Conversations(
        ids=ids,
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        prompt_lengths=prompt_lengths,
        skills=skills,
        skill_names=tuple(SKILLS),
        padding_id=padding_id,
        vocabulary_size=tokenizer.vocabulary_size,
    )


def save_conversations(path: Path, conversations: Conversations) -> None:
    """Write them to a compressed .npz under exactly this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, **{**vars(conversations)})


def load_conversations(path: Path) -> Conversations:
    """What `save_conversations` wrote."""
    with np.load(path) as arrays:
        return Conversations(
            ids=arrays["ids"],
            offsets=arrays["offsets"],
            prompt_lengths=arrays["prompt_lengths"],
            skills=arrays["skills"],
            skill_names=tuple(str(name) for name in arrays["skill_names"]),
            padding_id=int(arrays["padding_id"]),
            vocabulary_size=int(arrays["vocabulary_size"]),
        )


def batch_shapes(tokens_per_batch: int) -> list[tuple[int, int]]:
    """The (B, T) that batches of about so many tokens have, the shortest rows first."""
    return [(max(1, tokens_per_batch // length), length) for length in ROW_LENGTHS]


def batches(
    conversations: Conversations,
    *,
    tokens_per_batch: int,
    seed: int = 0,
    prompt_weight: float = PROMPT_WEIGHT,
) -> Iterator[Batch]:
    """Endless batches of the shapes of `batch_shapes`: every conversation once an epoch, shuffled.

    Rows that don't fill a batch wait for the next epoch. Raises ValueError where a conversation
    is longer than the longest row.
    """
    lengths = np.diff(conversations.offsets)
    if len(conversations) == 0 or lengths.max() > ROW_LENGTHS[-1]:
        raise ValueError(
            f"conversations need 1 to {ROW_LENGTHS[-1]} tokens, the longest has "
            f"{lengths.max(initial=0)}; make the tools or lists of the tasks shorter"
        )
    buckets = np.searchsorted(ROW_LENGTHS, lengths)
    shapes = batch_shapes(tokens_per_batch)
    waiting: list[list[int]] = [[] for _ in shapes]
    random_source = np.random.default_rng(seed)
    while True:
        for place in random_source.permutation(len(conversations)):
            bucket = buckets[place]
            waiting[bucket].append(int(place))
            rows, length = shapes[bucket]
            if len(waiting[bucket]) == rows:
                yield _batch(conversations, waiting[bucket], length, prompt_weight)
                waiting[bucket] = []


def _batch(
    conversations: Conversations, places: list[int], length: int, prompt_weight: float
) -> Batch:
    ids = np.full((len(places), length), conversations.padding_id, np.int32)
    mask = np.zeros((len(places), length), np.float32)
    for row, place in enumerate(places):
        start, end = conversations.offsets[place], conversations.offsets[place + 1]
        count, prompt_length = end - start, conversations.prompt_lengths[place]
        ids[row, :count] = conversations.ids[start:end]
        mask[row, 1:count] = prompt_weight
        # Up to <|im_end|>; the line break after it is never sampled.
        mask[row, prompt_length : count - 1] = 1.0
    return Batch(ids=ids, mask=mask)


@cache
def _tools(tokenizer_directory: str) -> tuple[ChatTemplate, Tokenizer]:
    return ChatTemplate.built_in(), Tokenizer.from_directory(tokenizer_directory)


def _encoded_chunk(
    tokenizer_directory: str, split: Split, seed: int, chunk: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(ids, lengths, prompt lengths, skills) of one chunk's examples."""
    template, tokenizer = _tools(tokenizer_directory)
    names = list(SKILLS)
    ids: list[int] = []
    lengths, prompt_lengths, skills = [], [], []
    for example in islice(stream(split, f"{seed}:{chunk}"), count):
        encoded, prompt_length = encode_example(example, template, tokenizer)
        ids += encoded
        lengths.append(len(encoded))
        prompt_lengths.append(prompt_length)
        skills.append(names.index(example["skill"]))
    return (
        np.array(ids, np.uint16),
        np.array(lengths, np.int32),
        np.array(prompt_lengths, np.int32),
        np.array(skills, np.uint8),
    )


if __name__ == "__main__":
    raise SystemExit(main())
