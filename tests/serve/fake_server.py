"""`python fake_server.py TOKENIZER_DIRECTORY SECONDS_PER_STEP [FLAGS]`: serve with no model."""

import sys
from dataclasses import dataclass

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.tokenizer import Tokenizer
from serve.__main__ import main


@dataclass(frozen=True)
class Loaded:
    engine: FakeEngine
    tokenizer: Tokenizer
    max_model_len: int
    model_name: str = "fake"
    description: str = "fake engine, no model"


def run(tokenizer_directory: str, seconds_per_step: float, flags: list[str]) -> int:
    def load(config: EngineConfig) -> Loaded:
        tokenizer = Tokenizer.from_directory(config.model or tokenizer_directory)
        max_model_len = config.max_model_len or 100_000
        engine = FakeEngine(
            vocabulary_size=tokenizer.vocabulary_size,
            script=lambda prompt: (1,),
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            seconds_per_step=seconds_per_step,
        )
        return Loaded(engine, tokenizer, max_model_len)

    return main(flags, load=load)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
