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

from bench.tiny_model.example import Example
from bench.tiny_model.fact_tasks import FACTS, fill, known_countries
from bench.tiny_model.tasks import stream
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.tokenizer_recipe import ADDED_TOKENS, tokenizer_config, train_tokenizer

NUM_BYTE_AND_MERGED_TOKENS = 3520
NUM_EXAMPLES = 6000
FACT_REPEATS = 4
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
    """Train the tokenizer and write its three files into the directory, which is made."""
    tokenizer = train_tokenizer(training_texts(), NUM_BYTE_AND_MERGED_TOKENS)
    config = tokenizer_config(NUM_BYTE_AND_MERGED_TOKENS, model_max_length=MODEL_MAX_LENGTH)
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write(
        directory / "tokenizer_config.json",
        json.dumps(config, indent=2, ensure_ascii=False),
    )
    template = resources.files("qwen35_jax") / "assets" / "chat_template.jinja"
    (directory / "chat_template.jinja").write_bytes(template.read_bytes())


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


def _rendered(template: ChatTemplate, example: Example) -> str:
    prompt = template.render(
        example["messages"], tools=example["tools"], enable_thinking=example["enable_thinking"]
    )
    return prompt + example["target"]


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    raise SystemExit(main())
