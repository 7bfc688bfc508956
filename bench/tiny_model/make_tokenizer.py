"""Trains the tiny model's tokenizer on what the tasks say.

    python -m bench.tiny_model.make_tokenizer --out DIRECTORY

Writes tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja in the
published layout: the same normaliser, split pattern, decoder and added tokens. The same code gives
the same files; the template is the embedded model's.
"""

import argparse
import json
import re
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bench.tiny_model.example import Example
from bench.tiny_model.fact_tasks import FACTS, fill, known_countries
from bench.tiny_model.tasks import stream
from bench.tiny_model.tokenizer_recipe import (
    ADDED_TOKENS,
    generation_config,
    tokenizer_config,
    train_tokenizer,
)
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.default_model import default_model_files

NUM_BYTE_AND_MERGED_TOKENS = 3520
NUM_EXAMPLES = 6000
FACT_REPEATS = 4
ALPHABET_REPEATS = 200
MODEL_MAX_LENGTH = 8192

_ADDED_TEXT = re.compile("|".join(re.escape(text) for text, _ in ADDED_TOKENS))
_CAPITALS = re.compile(r"[A-Z]{2,}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tiny_model.make_tokenizer", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    arguments = parser.parse_args(argv)
    write_tokenizer(arguments.out)
    return 0


def write_tokenizer(directory: Path) -> None:
    """Train the tokenizer and write its four files into the directory, which is made."""
    tokenizer = train_tokenizer(training_texts(), NUM_BYTE_AND_MERGED_TOKENS)
    config = tokenizer_config(NUM_BYTE_AND_MERGED_TOKENS, model_max_length=MODEL_MAX_LENGTH)
    template = (default_model_files() / "chat_template.jinja").read_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "generation_config.json", generation_config(NUM_BYTE_AND_MERGED_TOKENS))
    (directory / "chat_template.jinja").write_bytes(template)


def training_texts() -> Iterator[str]:
    """Rendered examples; every fact a few times, so that no name falls to pieces; the alphabet, so
    that a spelled letter is a token.

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
    yield from [" " + " ".join(string.ascii_lowercase)] * ALPHABET_REPEATS


def _rendered(template: ChatTemplate, example: Example) -> str:
    prompt = template.render(
        example["messages"], tools=example["tools"], enable_thinking=example["enable_thinking"]
    )
    return prompt + example["target"]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False))


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    raise SystemExit(main())
