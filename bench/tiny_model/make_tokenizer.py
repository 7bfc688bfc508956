"""Trains the tiny model's tokenizer on what the tasks say.

    python -m bench.tiny_model.make_tokenizer --out DIRECTORY

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja in the published layout: the
same normaliser, split pattern, decoder and added tokens. The same code gives the same files.
"""

import argparse
import json
import re
from collections.abc import Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

from bench.tiny_model.example import Example
from bench.tiny_model.fact_tasks import FACTS, fill, known_countries
from bench.tiny_model.tasks import stream
from qwen35_jax.chat_template import ChatTemplate

NUM_BYTE_AND_MERGED_TOKENS = 3520
NUM_EXAMPLES = 6000
FACT_REPEATS = 4
MODEL_MAX_LENGTH = 8192

# As published, section 8 of the specification.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# (spelling, special), in id order. tokenizer.json holds the first 26 and tokenizer_config.json all
# of them, as in the published files.
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|audio_start|>", True),
    ("<|audio_end|>", True),
    ("<tts_pad>", True),
    ("<tts_text_bos>", True),
    ("<tts_text_eod>", True),
    ("<tts_text_bos_single>", True),
    ("<|audio_pad|>", True),
)
NUM_ADDED_IN_VOCABULARY_FILE = 26
_ADDED_TEXT = re.compile("|".join(re.escape(text) for text, _ in ADDED_TOKENS))
_CAPITALS = re.compile(r"[A-Z]{2,}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tiny_model.make_tokenizer", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    arguments = parser.parse_args(argv)
    write_tokenizer(arguments.out)
    return 0


def write_tokenizer(directory: Path) -> None:
    """Train the tokenizer and write its three files into the directory, which is made."""
    tokenizer = train_tokenizer()
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write(
        directory / "tokenizer_config.json",
        json.dumps(tokenizer_config(), indent=2, ensure_ascii=False),
    )
    template = resources.files("qwen35_jax") / "assets" / "chat_template.jinja"
    (directory / "chat_template.jinja").write_bytes(template.read_bytes())


def train_tokenizer() -> tokenizers.Tokenizer:
    """The byte-level BPE with the first 26 added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = ByteLevelProcessor(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=NUM_BYTE_AND_MERGED_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    size = tokenizer.get_vocab_size()
    assert size == NUM_BYTE_AND_MERGED_TOKENS, f"too little text: only {size} tokens"
    tokenizer.add_tokens(
        [
            AddedToken(text, special=special, normalized=False)
            for text, special in ADDED_TOKENS[:NUM_ADDED_IN_VOCABULARY_FILE]
        ]
    )
    return tokenizer


def training_texts() -> Iterator[str]:
    """Rendered examples, and every fact a few times so that no name falls to pieces.

    Words all in capitals are left out, so that no merge joins capitals: codes and reversed words
    are then spelled letter by letter, which a small model can learn.
    """
    template = ChatTemplate.built_in()
    for example in islice(stream("train", "tokenizer"), NUM_EXAMPLES):
        text = _rendered(template, example)
        yield _CAPITALS.sub(" ", _ADDED_TEXT.sub("\n", text))
    for fact in FACTS:
        for country in known_countries(fact):
            reply = fill(fact.reply, fact.subject(country), fact.value(country) or "")
            yield from [_CAPITALS.sub(" ", reply)] * FACT_REPEATS


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json, which holds all 33 added tokens."""
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(NUM_BYTE_AND_MERGED_TOKENS + place): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for place, (text, special) in enumerate(ADDED_TOKENS)
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _rendered(template: ChatTemplate, example: Example) -> str:
    prompt = template.render(
        example["messages"], tools=example["tools"], enable_thinking=example["enable_thinking"]
    )
    return prompt + example["target"]


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    raise SystemExit(main())
