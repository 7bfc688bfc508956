"""How one request's tokens are chosen and when it ends. Checked once, when it is made."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NoReturn

from qwen35_jax.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
# What the device's integers hold; the vocabulary is far smaller.
MAX_INTEGER = 2**31 - 1

NUMBERS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logprobs", "prompt_logprobs"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options, named and defaulted as in vLLM.

    n: how many sequences to generate for the prompt, 1 to 128.
    temperature: 0 is greedy (argmax, the lowest id on ties); otherwise logits are divided by it.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p; in (0, 1].
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1].
    seed: the same seed draws the same random numbers whatever else runs beside it; None draws one.
        Choice i of n draws with seed + i. (In bfloat16 the logits themselves can still differ by
        a rounding between batch shapes.)
    presence_penalty: subtracted from the logit of each token generated so far; in [-2, 2].
    frequency_penalty: the same, times how often it was generated; in [-2, 2].
    repetition_penalty: divides the positive logits of tokens in the prompt or generated so far and
        multiplies the negative ones; over 0. Above 1 it discourages them, below 1 it favours them.
    logit_bias: token id (or its digits as text) -> what to add to its logit, in [-100, 100]; at
        most 300. It is kept as a tuple of (id, bias) by id.
    max_tokens: tokens to generate at most; None runs to the end of the context.
    min_tokens: tokens to generate before anything may end the request but max_tokens: until then no
        id that would is chosen. At most max_tokens.
    stop: strings that end the text, which stops before them.
    stop_token_ids: ids that end the request besides the checkpoint's own.
    ignore_eos: go on past the checkpoint's stop ids (stop_token_ids still end the request).
    logprobs: how many of the likeliest tokens to report beside the chosen one, 0 to 20;
        log-probabilities are the model's own, before bias, penalties, temperature and filters.
    prompt_logprobs: the same for the tokens of the prompt, 0 to 20.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidRequestError, naming field and value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: (
        Mapping[int, float]
        | Mapping[str, float]
        | Mapping[int | str, float]
        | Sequence[tuple[int, float]]
        | None
    ) = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        # numpy's numbers become Python's.
        for name in NUMBERS:
            object.__setattr__(self, name, _as_python_number(getattr(self, name)))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, low_is_open=True)
        object.__setattr__(self, "logit_bias", _as_logit_bias(self.logit_bias))
        _check_integer("n", self.n, low=1, high=MAX_N)
        _check_integer("top_k", self.top_k, low=-1, high=MAX_INTEGER)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("min_tokens", self.min_tokens, low=0, high=MAX_INTEGER)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
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
            _check_integer("stop_token_ids", token_id, low=0, high=MAX_INTEGER)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")

    def of_choice(self, index: int) -> "SamplingParams":
        """What the choice `index` of n runs with: n of 1, and a seed of its own.

        prompt_logprobs are the first choice's: they are the same for all.
        """
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None:
            # Into 64 bits with a sign, which is what a seed may be.
            seed = (seed + index + 2**63) % 2**64 - 2**63
        return replace(
            self, n=1, seed=seed, prompt_logprobs=self.prompt_logprobs if index == 0 else None
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _as_tuple(name: str, value: object) -> tuple:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(value)
    _refuse(name, value, "a list")


def _as_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    # Pairs too: what this makes goes in again when dataclasses.replace makes a copy.
    pairs = value.items() if isinstance(value, Mapping) else _as_tuple("logit_bias", value)
    if len(pairs) > MAX_LOGIT_BIAS:
        _refuse("logit_bias", len(pairs), f"at most {MAX_LOGIT_BIAS} ids")
    biases: dict[Any, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            _refuse("logit_bias", pair, "a mapping from token ids to numbers")
        token_id, bias = _as_python_number(pair[0]), _as_python_number(pair[1])
        # Not isdecimal: int() would take other alphabets' digits too.
        if isinstance(token_id, str) and re.fullmatch("[0-9]{1,10}", token_id):
            token_id = int(token_id)
        _check_integer("logit_bias: a token id", token_id, low=0, high=MAX_INTEGER)
        _check_number(f"logit_bias: the bias of {token_id}", bias, low=-100.0, high=100.0)
        if token_id in biases:
            _refuse("logit_bias: a token id", token_id, "named once")
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))


def _as_python_number(value: Any) -> Any:
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
    """name: the field, and after a colon the part of it that is wrong."""
    field = name.partition(":")[0]
    raise InvalidRequestError(f"{name} must be {wanted}, not {value!r}", param=field)
