"""The full-size model, from a random checkpoint to figures: load speed, memory, exactness.

    python -m bench.full_size --tokenizer DIR [--device cuda] [--work DIR]

Makes a checkpoint with transformers in the published layout (9.1 GB on disk), loads it twice, and
compares logits with transformers at every length. Leaves load.json and accuracy.json in --out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.results_file import write_results

CONFIG = Path(__file__).parent / "configs" / "qwen3.5-4b.json"
RESULTS = Path(__file__).parent / "results"
LENGTHS = "5,127,1024,4097,8192"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.full_size",
        description="Measure loading and exactness on a full-size random checkpoint.",
    )
    parser.add_argument(
        "--tokenizer", required=True, type=Path, metavar="DIR", help="the real tokenizer's files"
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="default: %(default)s")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep the checkpoint here (default: a temporary)"
    )
    parser.add_argument("--device", default="cuda", help="makes the weights (default: %(default)s)")
    parser.add_argument("--prompt-lengths", default=LENGTHS, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--numerics", default="checkpoint", choices=("checkpoint", "transformers"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--commit", help="the code's commit (default: what git says)")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = arguments.work or Path(temporary) / "checkpoint"
        if not (checkpoint / "config.json").exists():
            make = [str(arguments.config), str(checkpoint), "--device", arguments.device]
            _run("bench.make_checkpoint", *make, "--tokenizer", str(arguments.tokenizer))
        load = [str(checkpoint), "--json", str(arguments.out / "load.json")]
        _run("bench.load", *load, *(["--commit", arguments.commit] if arguments.commit else []))
        figures = Path(temporary) / "verify.json"
        verify = [str(checkpoint), "--prompt-lengths", arguments.prompt_lengths]
        verify += ["--steps", str(arguments.steps), "--numerics", arguments.numerics]
        passed = _run("qwen35_jax.cli", "verify", *verify, "--json", str(figures), may_exit=(0, 1))
        content = json.loads(figures.read_text())
    flags = {
        "prompt_lengths": arguments.prompt_lengths,
        "steps": arguments.steps,
        "numerics": arguments.numerics,
    }
    write_results(
        arguments.out / "accuracy.json",
        name="accuracy",
        command="python -m bench.full_size --tokenizer DIR",
        model={"config": arguments.config.name, "weights": "random, seed 0"},
        flags=flags | {"passed": content["passed"], "reference": content["reference"]},
        rows=content["rows"],
        commit=arguments.commit,
    )
    return passed


def _run(module: str, *arguments: str, may_exit: tuple[int, ...] = (0,)) -> int:
    command = [sys.executable, "-m", module, *arguments]
    print("+ " + " ".join(command[1:]), file=sys.stderr, flush=True)
    code = subprocess.run(command, check=False).returncode
    if code not in may_exit:
        raise SystemExit(f"bench.full_size: {module} failed with exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
