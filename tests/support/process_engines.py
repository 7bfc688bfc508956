"""Factories for engine processes: fake engines whose prompts say what goes wrong. No jax here."""

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.errors import CheckpointError, ConfigError

logger = logging.getLogger("qwen35_jax.fake")

VOCABULARY_SIZE = 320
MAX_MODEL_LEN = 5000
LONG_MODEL_LEN = 100_000

# The first id of a prompt that makes the next step do so. Ids of the fake are below.
RAISE = 1001
EXIT = 1002
HANG = 1003
FORGET = 1004
LOG = 1005
# Not a step but the submit itself.
BREAK_SUBMIT = 1006
EXIT_CODE = 7


@dataclass(frozen=True)
class Loaded:
    engine: FakeEngine
    max_model_len: int = MAX_MODEL_LEN
    model_name: str = "fake"
    description: str = "fake engine, no model"


class TroubledEngine(FakeEngine):
    """Does what the first id of a prompt says; a step takes a millisecond unless options say."""

    def __init__(self, **options: Any):
        defaults = {"max_model_len": MAX_MODEL_LEN, "seconds_per_step": 0.001}
        super().__init__(vocabulary_size=VOCABULARY_SIZE, **defaults | options)
        self._trouble: dict[int, str] = {}

    def submit(self, request: Request) -> None:
        if request.prompt_token_ids[:1] == (BREAK_SUBMIT,):
            raise KeyError("a bug in submit")
        super().submit(request)
        self._trouble[request.prompt_token_ids[0]] = request.request_id

    def step(self) -> list[TokenOutput]:
        trouble, self._trouble = self._trouble, {}
        if RAISE in trouble:
            raise RuntimeError("out of memory\nand pages of detail")
        if EXIT in trouble:
            os._exit(EXIT_CODE)
        if HANG in trouble:
            time.sleep(3600)
        if FORGET in trouble:
            self.abort(trouble[FORGET])
            super().step()
        if LOG in trouble:
            logger.warning("a step says so; jax is %s", "here" if "jax" in sys.modules else "not")
        return super().step()


def load(config: EngineConfig) -> Loaded:
    logger.info("loading %s", config.model)
    return Loaded(TroubledEngine(max_num_seqs=config.max_num_seqs))


def load_long(config: EngineConfig) -> Loaded:
    """For requests that take minutes; each id is 1."""
    engine = TroubledEngine(
        script=lambda prompt: (1,), max_model_len=LONG_MODEL_LEN, seconds_per_step=0.005
    )
    return Loaded(engine, max_model_len=LONG_MODEL_LEN)


def load_and_tell_files(config: EngineConfig) -> Loaded:
    """description: where this process's descriptors go, and which ones its children would get."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    found: dict[int, str] = {}
    for number in numbers:
        # That of the listing itself is closed.
        with suppress(FileNotFoundError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    inheritable = [number for number in found if os.get_inheritable(number)]
    loaded = load(config)
    return replace(loaded, description=json.dumps([found, inheritable]))


def load_for_ever(config: EngineConfig) -> Loaded:
    logger.info("loading for ever in %d", os.getpid())
    time.sleep(3600)
    raise AssertionError


def refuse_config(config: EngineConfig) -> Loaded:
    raise ConfigError(f"max_model_len {config.max_model_len} is too much; ask for less")


def tell_config(config: EngineConfig) -> Loaded:
    raise ConfigError(json.dumps(asdict(config)))


def refuse_checkpoint(config: EngineConfig) -> Loaded:
    raise CheckpointError("model.safetensors is truncated; fetch it again")


def break_down(config: EngineConfig) -> Loaded:
    raise ZeroDivisionError("a bug in loading")


def die(config: EngineConfig) -> Loaded:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError
