"""`qwen35 verify`: does this engine give the reference model's logits on a local checkpoint?

transformers runs each prompt and then its own greedy continuation; this engine is fed the same
tokens and compared at every step. Three figures, over the reference's 64 likeliest tokens:

    regret  how much likelier the reference's best token is to it than this engine's best
    mean    of |difference of log-probability|
    p99     of the same
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qwen35_jax.engine_arguments import (
    add_engine_arguments,
    add_seed_argument,
    engine_config,
    log_to_terminal,
)
from qwen35_jax.errors import ConfigError

if TYPE_CHECKING:
    from qwen35_jax.model.transformer import Qwen35

MAX_REGRET, MAX_MEAN, MAX_P99 = 0.20, 0.06, 0.20
DEFAULT_LENGTHS = (5, 127, 1024)
# The prompt's last tokens that are compared; all of a long prompt's logits would not fit.
PROMPT_POSITIONS = 64


@dataclass(frozen=True)
class Comparison:
    """One prompt's figures. same_tokens counts the steps where both chose the same token."""

    prompt_tokens: int
    stage: str
    positions: int
    same_tokens: int
    regret: float
    mean: float
    p99: float

    @property
    def passed(self) -> bool:
        return self.regret <= MAX_REGRET and self.mean <= MAX_MEAN and self.p99 <= MAX_P99


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen35 verify",
        description="Compare a checkpoint's logits and greedy tokens with transformers' "
        f"(both installed). Passes at regret <= {MAX_REGRET}, mean <= {MAX_MEAN}, p99 <= "
        f"{MAX_P99}. Exit code 0 says it passed, 1 that it did not, 2 that it could not run.",
        allow_abbrev=False,
    )
    add_engine_arguments(parser, model_required=True)
    parser.add_argument(
        "--prompt-lengths",
        default=",".join(map(str, DEFAULT_LENGTHS)),
        metavar="N,N,...",
        help="lengths of the random prompts, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=64, help="greedy steps after each (default: %(default)s)"
    )
    parser.add_argument(
        "--reference-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where transformers runs (default: %(default)s)",
    )
    parser.add_argument(
        "--reference-python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter that has torch and transformers (default: this one)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    add_seed_argument(parser, help="seed of the prompts (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    lengths = _parse_lengths(arguments.prompt_lengths)
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be at least 1, not {arguments.steps}")
    if arguments.load_format != "auto":
        raise ConfigError("--load-format dummy has no checkpoint to compare: use auto")
    if arguments.seed < 0:
        raise ConfigError(f"--seed must be at least 0, not {arguments.seed}")
    if arguments.json and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        raise ConfigError(f"--json {arguments.json}: want a file in a directory that exists")
    config = engine_config(parser, arguments, seed=arguments.seed)
    log_to_terminal()

    from qwen35_jax.hub import resolve_model
    from qwen35_jax.model_files import model_config_of
    from qwen35_jax.tokenizer import Tokenizer

    directory = resolve_model(config.model or "")
    model_config = model_config_of(directory, config)
    vocabulary_size = Tokenizer.from_directory(directory).vocabulary_size
    _require_reference(arguments.reference_python)
    room = config.max_model_len or model_config.max_position_embeddings
    if max(lengths) + arguments.steps > room:
        raise ConfigError(
            f"prompts of {max(lengths)} tokens and {arguments.steps} steps don't fit the context "
            f"of {room}"
        )
    stream = np.random.default_rng(arguments.seed)
    prompts = {str(length): stream.integers(0, vocabulary_size, length) for length in lengths}
    reference = _run_reference(
        arguments.reference_python,
        directory,
        prompts,
        dtype=model_config.dtype,
        device=arguments.reference_device,
        steps=arguments.steps,
    )
    print("Reference: " + ", ".join(reference["versions"]), flush=True)

    from qwen35_jax.checkpoint import load_checkpoint

    params = load_checkpoint(directory, config=model_config)
    comparisons = []
    print(f"{'prompt':>8} {'stage':>8} {'same':>9} {'regret':>8} {'mean':>8} {'p99':>8}")
    for name, prompt in prompts.items():
        for comparison in compare(params, name, prompt, reference):
            comparisons.append(comparison)
            print(_table_row(comparison), flush=True)
    passed = all(comparison.passed for comparison in comparisons)
    print("PASS" if passed else "FAIL: this engine does not give the reference's logits")
    if arguments.json:
        rows = [asdict(one) | {"passed": one.passed} for one in comparisons]
        content = {"passed": passed, "reference": list(map(str, reference["versions"]))}
        arguments.json.write_text(json.dumps(content | {"rows": rows}, indent=2) + "\n")
    return 0 if passed else 1


def compare(
    params: "Qwen35",
    name: str,
    prompt: np.ndarray,
    reference: dict[str, np.ndarray],
) -> list[Comparison]:
    """Run the reference's tokens through this engine: the end of the prompt, then each step."""
    import jax
    import jax.numpy as jnp

    from qwen35_jax.model.cache import init_state
    from qwen35_jax.model.transformer import decode, hidden_states, unembed

    tokens = reference[f"{name}.tokens"]
    kept = reference[f"{name}.prompt.ids"].shape[0]

    @jax.jit
    def run_prompt(params, ids, wanted):
        state = init_state(params.config, 1, ids.shape[1] + len(tokens))
        hidden, state = hidden_states(params, ids, state)
        return _pick(unembed(params, hidden[0, -kept:]), wanted), state

    @jax.jit
    def run_token(params, token, state, wanted):
        logits, state = decode(params, token, state)
        return _pick(logits, wanted), state

    wanted = jnp.asarray(reference[f"{name}.prompt.ids"])
    picked, state = run_prompt(params, jnp.asarray(prompt[None], jnp.int32), wanted)
    rows = [_compare(len(prompt), "prompt", picked, reference, f"{name}.prompt")]
    steps = []
    for token, ids in zip(tokens, reference[f"{name}.greedy.ids"], strict=True):
        picked, state = run_token(params, jnp.asarray([token]), state, jnp.asarray(ids[None]))
        steps.append(picked)
    best, logprobs = zip(*jax.device_get(steps), strict=True)
    joined = (np.concatenate(best), np.concatenate(logprobs))
    rows.append(_compare(len(prompt), "greedy", joined, reference, f"{name}.greedy"))
    return rows


def _pick(logits, wanted):
    """logits: [N, V], wanted: [N, 64] ids -> the best id [N] and log-probabilities [N, 64]."""
    import jax
    import jax.numpy as jnp

    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.argmax(logits, axis=-1), jnp.take_along_axis(logprobs, wanted, axis=-1)


def _compare(
    prompt_tokens: int,
    stage: str,
    picked: tuple[np.ndarray, np.ndarray],
    reference: dict[str, np.ndarray],
    name: str,
) -> Comparison:
    best, logprobs = (np.asarray(array) for array in picked)
    ids, reference_logprobs = reference[f"{name}.ids"], reference[f"{name}.logprobs"]
    difference = np.abs(logprobs - reference_logprobs)
    is_best = ids == best[:, None]
    # A token outside the reference's 64 is at most as likely as the last of them.
    of_best = np.where(
        is_best.any(-1),
        np.where(is_best, reference_logprobs, -np.inf).max(-1),
        reference_logprobs[:, -1],
    )
    return Comparison(
        prompt_tokens=prompt_tokens,
        stage=stage,
        positions=len(best),
        same_tokens=int((best == ids[:, 0]).sum()),
        regret=float((reference_logprobs[:, 0] - of_best).max()),
        mean=float(difference.mean()),
        p99=float(np.quantile(difference, 0.99)),
    )


def _require_reference(python: str) -> None:
    code = "import torch, transformers; transformers.Qwen3_5ForCausalLM"
    try:
        finished = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--reference-python {python}: {error.strerror}") from None
    if finished.returncode:
        raise ConfigError(
            f"verify needs torch and transformers 5.17 ({_last_line(finished.stderr)}): "
            f"{python} -m pip install torch transformers==5.17.0, or name another interpreter "
            "with --reference-python"
        )


def _run_reference(
    python: str,
    directory: Path,
    prompts: dict[str, np.ndarray],
    *,
    dtype: str,
    device: str,
    steps: int,
) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        prompt_file, output_file = Path(folder) / "prompts.npz", Path(folder) / "reference.npz"
        np.savez(prompt_file, **prompts)  # pyright: ignore[reportArgumentType]
        command = [python, str(Path(__file__).with_name("verify_reference.py"))]
        command += [str(directory), str(prompt_file), str(output_file)]
        command += ["--dtype", dtype, "--device", device]
        command += ["--positions", str(PROMPT_POSITIONS), "--steps", str(steps)]
        print(f"Running transformers on {len(prompts)} prompts ...", file=sys.stderr, flush=True)
        finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if finished.returncode:
            raise ConfigError(
                f"transformers could not run {directory}: {_last_line(finished.stderr)}"
            )
        return dict(np.load(output_file))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _table_row(row: Comparison) -> str:
    mark = "" if row.passed else "  over the limit"
    return (
        f"{row.prompt_tokens:>8} {row.stage:>8} {row.same_tokens:>4}/{row.positions:<4} "
        f"{row.regret:>8.4f} {row.mean:>8.4f} {row.p99:>8.4f}{mark}"
    )


def _parse_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1 or len(set(lengths)) != len(lengths):
        raise ConfigError(f"--prompt-lengths must be different positive integers, not {text!r}")
    return lengths
