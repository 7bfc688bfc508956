"""A tokenizer like the real one in everything but size: 320 ids, files as a checkpoint has them."""

import json
from pathlib import Path
from typing import Any

from qwen35_jax.default_model import default_model_files

PRE_TOKENIZER_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In rank order, in the byte alphabet: G with a dot is a space, and the last two make an e acute.
MERGES = (
    "Ġ t", "h e", "i n", "e r", "o n", "r e", "a t", "e n", "o r", "i s",
    "Ġt he", "in g", "a n", "an d", "Ġ a", "Ġ w", "Ġw or", "l l", "ll o", "he llo",
    "l d", "Ġwor ld", "u s", "us er", "s y", "at e", "h i", "Ġ b", "e t", "et a",
    "Ã ©",
)  # fmt: skip

# (text, special), in id order, after the bytes and the merges.
ADDED_TOKENS = (
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
# As published: tokenizer.json ends at </think>, the rest stands in tokenizer_config.json only.
ADDED_TOKENS_IN_VOCABULARY_FILE = 26

FIRST_ADDED_ID = 256 + len(MERGES)
VOCABULARY_SIZE = FIRST_ADDED_ID + len(ADDED_TOKENS)
ADDED_IDS = {text: FIRST_ADDED_ID + place for place, (text, _) in enumerate(ADDED_TOKENS)}
END_OF_TEXT_ID = ADDED_IDS["<|endoftext|>"]
END_OF_TURN_ID = ADDED_IDS["<|im_end|>"]


def write_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", tokenizer_config_json()),
    ):
        text = json.dumps(content, ensure_ascii=False)
        (directory / name).write_text(text, encoding="utf-8")
    template = default_model_files() / "chat_template.jinja"
    (directory / "chat_template.jinja").write_bytes(template.read_bytes())


def tokenizer_json() -> dict[str, Any]:
    characters = _byte_alphabet()
    spellings = characters + [merge.replace(" ", "") for merge in MERGES]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": PRE_TOKENIZER_REGEX},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, **entry}
            for token_id, entry in _added_entries()[:ADDED_TOKENS_IN_VOCABULARY_FILE]
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelling: token_id for token_id, spelling in enumerate(spellings)},
            "merges": list(MERGES),
        },
    }


def tokenizer_config_json() -> dict[str, Any]:
    return {
        "added_tokens_decoder": {str(token_id): entry for token_id, entry in _added_entries()},
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 262144,
        "tokenizer_class": "Qwen2Tokenizer",
    }


def _added_entries() -> list[tuple[int, dict[str, Any]]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        (ADDED_IDS[text], {"content": text, **flags, "special": special})
        for text, special in ADDED_TOKENS
    ]


def _byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes, printable ones first, as in the real files."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [
        chr(0x100 + place) for place in range(256 - len(printable))
    ]
