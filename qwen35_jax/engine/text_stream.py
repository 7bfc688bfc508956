"""One request's token outputs to text: whole characters, ended before a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_jax.engine.request import FinishReason, TokenLogprobs, TokenOutput
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What one TokenOutput adds to a request's text.

    text: may be empty while ids make half a character or what may become a stop string.
    token_ids, logprobs: those of the output, up to the id that completed a stop string.
    finish_reason: set once, in the last delta that says anything.
    stop_reason: the stop string or the stop id that ended the text, if one did.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class TextStream:
    """The text of one request. Deltas after the one with a finish_reason are empty.

    When a stop string ends the text the engine doesn't know: the caller aborts its request. They
    are looked for in what comes after params.min_tokens tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self._stop_strings = _StopStrings(tuple(params.stop or ()))
        self._min_tokens = params.min_tokens
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> list[int]:
        """All ids given out so far, with a stop id that ended them."""
        return list(self._token_ids)

    @property
    def finished(self) -> bool:
        return self._finished

    def push(self, output: TokenOutput) -> TextDelta:
        """Take the engine's next output for this request."""
        if self._finished:
            return TextDelta()
        finish_reason = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        ended_by_id = finish_reason == "stop"
        text_ids = output.token_ids[:-1] if ended_by_id else output.token_ids
        used = len(output.token_ids)
        texts: list[str] = []
        stop_string = None
        for count, token_id in enumerate(text_ids, start=1):
            text = self._decoder.push((token_id,))
            if len(self._token_ids) + count > self._min_tokens:
                text, stop_string = self._stop_strings.push(text)
            texts.append(text)
            if stop_string is not None:
                used = count
                break
        if stop_string is None and finish_reason is not None:
            last_text = self._decoder.finish(cut=not ended_by_id)
            text, stop_string = self._stop_strings.push(last_text)
            texts.append(text)
            if stop_string is None:
                texts.append(self._stop_strings.finish())
        if stop_string is not None:
            finish_reason, stop_reason = "stop", stop_string

        delta = TextDelta(
            text="".join(texts),
            token_ids=output.token_ids[:used],
            logprobs=None if output.logprobs is None else output.logprobs[:used],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._finished = finish_reason is not None
        return delta


class _StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    First is by where it ends, so that pieces don't matter; of those with one end the longest.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        # The longest end of the text so far that begins some stop string.
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to give out, and the stop string that ended it, if one did."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        held_from = self._first_open_start(text)
        self._held = text[held_from:]
        return text[:held_from], None

    def finish(self) -> str:
        """The text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _first_open_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stops):
                return start
        return len(text)
