"""How one request's tokens are chosen and when it ends. Checked once, when it is made."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NoReturn

from qwen35_jax.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
# What the device's integers hold; the vocabulary is far smaller.
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options, named and defaulted as in vLLM.

    temperature: 0 is greedy (argmax, the lowest id on ties); otherwise logits are divided by it.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p; in (0, 1].
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1].
    seed: the same seed draws the same random numbers whatever else runs beside it; None draws one.
        (In bfloat16 the logits themselves can still differ by a rounding between batch shapes.)
    max_tokens: tokens to generate at most; None runs to the end of the context.
    stop: strings that end the text, which stops before them.
    stop_token_ids: ids that end the request besides the checkpoint's own.
    ignore_eos: go on past the checkpoint's stop ids (stop_token_ids still end the request).
    logprobs: how many of the likeliest tokens to report beside the chosen one, 0 to 20;
        log-probabilities are the model's own, before temperature and filters.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidRequestError, naming field and value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        # numpy's numbers become Python's.
        for name in ("temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "logprobs"):
            object.__setattr__(self, name, _as_python_number(getattr(self, name)))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_integer("top_k", self.top_k, low=-1, high=MAX_TOKEN_ID)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if len(stop) > MAX_STOP_STRINGS:
            _refuse("stop", len(stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "non-empty strings")
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
            _refuse(
                "stop_token_ids",
                len(self.stop_token_ids or ()),
                f"at most {MAX_STOP_TOKEN_IDS} ids",
            )
        for token_id in self.stop_token_ids or ():
            _check_integer("stop_token_ids", token_id, low=0, high=MAX_TOKEN_ID)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _as_tuple(name: str, value: object) -> tuple:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(value)
    _refuse(name, value, "a list")


def _as_python_number(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _check_number(
    name: str, value: object, *, low: float, high: float = math.inf, low_is_open: bool = False
) -> None:
    wanted = f"{'(' if low_is_open else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, value, f"a number in {wanted}")
    # Not math.isfinite: it raises OverflowError for an integer that no float holds.
    if not abs(value) <= sys.float_info.max:
        _refuse(name, value, f"a number in {wanted}")
    if not low <= value <= high or (low_is_open and value == low):
        _refuse(name, value, f"in {wanted}")


def _check_integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, value, wanted)
    if value < low or (high is not None and value > high):
        _refuse(name, value, wanted)


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise InvalidRequestError(f"{name} must be {wanted}, not {value!r}", param=name)
