"""Text to token ids and back: the checkpoint's byte-level BPE, read through `tokenizers`."""

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers

from qwen35_jax.errors import InvalidRequestError, TokenizerError

# Of a token id in decimal, as a key of tokenizer_config.json.
MAX_ID_DIGITS = 10
# The Kelvin sign's three bytes become one, a Hangul syllable's nine become three; no more.
NFC_SHRINKS_AT_MOST = 3
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """A byte-level BPE vocabulary with its added tokens.

    vocabulary_size: the highest id + 1. A model's padded vocabulary may be larger; logits at and
        above it must never be sampled.
    eos_token_ids: the ids that end a turn, as the tokenizer's own config names them.
    longest_token_bytes: the most bytes of UTF-8 text that one id can stand for, counted before
        the text is normalised; None where there is no bound.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, eos_token_ids: tuple[int, ...] = ()):
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise TokenizerError(
                f"decoder {type(backend.decoder).__name__} is not supported, only ByteLevel"
            )
        # A saved truncation or padding would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self._byte_of_character = _byte_of_character()
        self._bytes_by_id: dict[int, bytes] = {}
        vocabulary = backend.get_vocab()
        self.vocabulary_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes: int | None = _longest_token_bytes(backend, vocabulary)
        self.eos_token_ids = eos_token_ids

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Load tokenizer.json and tokenizer_config.json of a checkpoint directory.

        Added tokens that only tokenizer_config.json lists are added at their ids. Raises
        TokenizerError naming the file.
        """
        vocabulary_path = Path(path) / "tokenizer.json"
        config_path = Path(path) / "tokenizer_config.json"
        if not vocabulary_path.is_file():
            raise TokenizerError(
                f"{vocabulary_path} does not exist; copy the tokenizer's files from the model that "
                "these weights come from"
            )
        config = read_json_object(config_path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(vocabulary_path))
        # The library raises bare Exception, whatever is wrong with the file.
        except Exception as error:
            raise TokenizerError(
                f"{vocabulary_path} can't be read as a tokenizer: {one_line(error)}"
            ) from None
        _add_config_tokens(backend, config.get("added_tokens_decoder"), config_path)
        eos_token_ids = _eos_token_ids(backend, config, config_path)
        try:
            return cls(backend, eos_token_ids=eos_token_ids)
        except TokenizerError as error:
            raise TokenizerError(f"{vocabulary_path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Nothing is added; added tokens spelled out in it become their ids.

        Raises InvalidRequestError for a lone surrogate, which no bytes stand for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character "
                f"{error.start}), which is not Unicode text; send whole characters"
            ) from None
        # Not `encode`, which keeps every other Python thread waiting, for seconds on long texts.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        decoder = IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)
        return decoder.push(ids) + decoder.finish(cut=False)

    def token_to_id(self, text: str) -> int | None:
        """The id of the token spelled `text` in the vocabulary, or None."""
        return self._backend.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out of the text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for, which may be part of a character.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        known = self._bytes_by_id.get(token_id)
        if known is None:
            known = self._bytes_by_id[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        in_range = 0 <= token_id < self.vocabulary_size
        token = self._backend.id_to_token(token_id) if in_range else None
        if token is None:
            raise InvalidRequestError(
                f"token id {token_id} is not in the vocabulary of {self.vocabulary_size} ids"
            )
        try:
            return bytes(self._byte_of_character[character] for character in token)
        except KeyError:
            return token.encode()


class IncrementalDecoder:
    """Turns one sequence's ids into text as they come, only ever whole characters."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. The start of a character is kept for the next push.

        Raises InvalidRequestError for an id outside the vocabulary, and then takes none of them.
        """
        tokenizer = self._tokenizer
        spelled = b"".join(
            tokenizer.token_bytes(token_id)
            for token_id in ids
            if not (self._skip_special_tokens and tokenizer.is_special(token_id))
        )
        return self._utf8.decode(spelled)

    def finish(self, *, cut: bool) -> str:
        """End the text: what is left of it.

        cut: the sequence was stopped from outside (max_tokens), so an unfinished character is
        dropped; otherwise the model left it so, and it becomes U+FFFD.
        """
        if cut:
            self._utf8.reset()
            return ""
        return self._utf8.decode(b"", final=True)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises TokenizerError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise TokenizerError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} can't be read as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks; its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def token_text(value: object) -> str | None:
    """The spelling of a token in tokenizer_config.json: a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _add_config_tokens(backend: tokenizers.Tokenizer, entries: object, config_path: Path) -> None:
    if entries is None:
        return
    if not isinstance(entries, dict):
        raise TokenizerError(f"{config_path}: added_tokens_decoder must be an object")
    wanted: dict[int, AddedToken] = {}
    for key, entry in entries.items():
        content = token_text(entry)
        is_id = key.isdecimal() and len(key) <= MAX_ID_DIGITS
        if not (isinstance(entry, dict) and content and _is_unicode(content) and is_id):
            raise TokenizerError(
                f"{config_path}: added_tokens_decoder entry {key[:40]!r} must map an id to a token"
            )
        flags = {name: bool(entry[name]) for name in ADDED_TOKEN_FLAGS if name in entry}
        wanted[int(key)] = AddedToken(content, **flags)
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    # The library numbers new tokens in the order they come, from the count of ids it has.
    in_order = [token for _, token in sorted(wanted.items(), key=lambda item: item[0])]
    backend.add_tokens([token for token in in_order if token.content not in present])
    for token_id, token in wanted.items():
        actual_id = backend.token_to_id(token.content)
        if actual_id != token_id:
            raise TokenizerError(
                f"{config_path}: added token {token.content!r} should have id {token_id}, but "
                f"tokenizer.json makes it {actual_id}; the two files don't belong together"
            )


def _eos_token_ids(
    backend: tokenizers.Tokenizer, config: dict[str, Any], config_path: Path
) -> tuple[int, ...]:
    value = config.get("eos_token")
    if value is None:
        return ()
    text = token_text(value)
    token_id = None if text is None or not _is_unicode(text) else backend.token_to_id(text)
    if token_id is None:
        raise TokenizerError(f"{config_path}: eos_token {value!r} is not in the vocabulary")
    return (token_id,)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 has bytes for it, which it hasn't for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _longest_token_bytes(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> int | None:
    shrinks_at_most = 1
    if isinstance(backend.normalizer, normalizers.NFC):
        shrinks_at_most = NFC_SHRINKS_AT_MOST
    elif backend.normalizer is not None:
        return None
    added = backend.get_added_tokens_decoder().values()
    # These take all the white space beside them along.
    if any(token.lstrip or token.rstrip for token in added):
        return None
    # In the byte alphabet a character is a byte.
    lengths = [*map(len, vocabulary), *(len(token.content.encode()) for token in added)]
    return shrinks_at_most * max(lengths, default=0)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest starts at U+0100."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in themselves}
    others = [byte for byte in range(256) if byte not in set(themselves)]
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}
