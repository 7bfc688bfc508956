"""Log-probabilities of generated tokens in the shape that OpenAI's completions give them."""

from collections.abc import Sequence

from qwen35_jax.engine.request import TokenLogprobs
from qwen35_jax.tokenizer import IncrementalDecoder, Tokenizer
from serve.protocol import CompletionLogprobs

# JSON has no minus infinity, and clients read null as "not computed".
LOWEST_LOGPROB = -9999.0


class LogprobsWriter:
    """Writes one choice's log-probabilities, keeping the place in its text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs:
        """The entries of the next tokens. The chosen token is always among the top ones."""
        written = empty_logprobs()
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            # One number for both, because clients compare them to see whether a token was the top.
            chosen = max(entry.token, LOWEST_LOGPROB)
            text = token_text(self._tokenizer, token_id)
            top = {
                token_text(self._tokenizer, other_id): max(logprob, LOWEST_LOGPROB)
                for other_id, logprob in entry.top
            }
            top[text] = chosen
            written.tokens.append(text)
            written.token_logprobs.append(chosen)
            written.top_logprobs.append(top)
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.push((token_id,)))
        return written


def empty_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs([], [], [], [])


def extend_logprobs(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.top_logprobs += more.top_logprobs
    logprobs.text_offset += more.text_offset


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token's text; `bytes:\xe2\x80` for one that is only part of a character."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
