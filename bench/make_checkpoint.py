"""Writes a random checkpoint in the published layout, by transformers' own model class.

    python bench/make_checkpoint.py CONFIG_JSON OUT_DIR [--device cuda] [--tokenizer DIR]

Benchmarks and load tests need the real names, shapes and dtypes, not the real values. Needs torch
and transformers 5.x, which nothing else in the project imports.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

_RESIDUAL_MATRICES = ("out_proj.weight", "o_proj.weight", "down_proj.weight")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# As the class initialises it: initializer_range times the square root of the width.
LOGIT_STD = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one line on stderr for what the user can put right."""
    options = _parse(arguments)
    try:
        make_checkpoint(
            options.config,
            options.out,
            device=options.device,
            seed=options.seed,
            max_shard_size=options.max_shard_size,
            tokenizer=options.tokenizer,
        )
    except (ImportError, OSError, ValueError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    return 0


def make_checkpoint(
    config_path: Path,
    out: Path,
    *,
    device: str = "cpu",
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: Path | None = None,
) -> None:
    """Write `out`/config.json, the safetensors shards and, if given, the tokenizer's files.

    The weights are made on `device` in bfloat16, A_log and linear_attn.norm.weight in float32 as
    the published checkpoint stores them. Equal seeds give equal files on one kind of device.

    Raises ValueError for a config that is not nested, an output folder that isn't empty or a
    device that is missing; OSError for unreadable files; ImportError without torch and
    transformers.
    """
    config = _read_config(config_path)
    tokenizer_files = _tokenizer_files(tokenizer)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another")
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import (  # pyright: ignore[reportMissingImports]
            Qwen3_5Config,
            Qwen3_5ForConditionalGeneration,
        )
    except ImportError as error:
        raise ImportError(
            f"needs torch and transformers 5.x with Qwen3.5 (pip install them): {error}"
        ) from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; use --device cpu")

    start = time.perf_counter()
    torch.manual_seed(seed)
    with torch.device(device):
        # The class initialises every matrix at its config's initializer_range.
        model = Qwen3_5ForConditionalGeneration._from_config(
            Qwen3_5Config.from_dict(config), dtype=torch.bfloat16
        )
    model.eval()
    with torch.no_grad():
        _randomise_text(torch, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters on {device} after {time.perf_counter() - start:.1f} s")
    print(f"logit std {_logit_std(torch, model, seed):.2f} on random ids")

    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size=max_shard_size)
    # As published: transformers rewrites the first file, and the 4B repository lacks the second.
    shutil.copyfile(config_path, out / "config.json")
    (out / "generation_config.json").unlink(missing_ok=True)
    for file in tokenizer_files:
        shutil.copyfile(file, out / file.name)
    shards = sorted(out.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    seconds = time.perf_counter() - start
    print(f"{out}: {len(shards)} shard(s), {size:,} bytes, {seconds:.1f} s in all")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a random checkpoint.")
    parser.add_argument("config", metavar="CONFIG_JSON", type=Path, help="a nested config.json")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="a new or empty folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument(
        "--tokenizer", metavar="DIR", type=Path, help="copy the tokenizer's files from here"
    )
    return parser.parse_args(arguments)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    for part in ("text_config", "vision_config"):
        if not isinstance(config, dict) or not isinstance(config.get(part), dict):
            raise ValueError(f"{path} has no {part}: give a nested config.json, as published")
    return config


def _tokenizer_files(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--tokenizer {folder}: there is no tokenizer.json in it")
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _randomise_text(torch: Any, model: Any) -> None:
    """Give every small text parameter a value that shows when it is used wrongly, in place.

    The class leaves norm offsets at 0, dt_bias at 1 and the gated norm at 1, which would hide a
    loader that mixes them up.
    """
    text = model.model.language_model
    hidden_size = text.config.hidden_size
    for name, parameter in text.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.empty_like(parameter, dtype=torch.float32)
            parameter.uniform_(0.5, 16.0).log_()
        elif name.endswith("dt_bias"):
            # Half of the heads forget slowly, as trained ones do.
            parameter.normal_()
            parameter[::2] -= 5.0
        elif name.endswith("linear_attn.norm.weight"):
            parameter.data = torch.empty_like(parameter, dtype=torch.float32)
            parameter.normal_(1.0, 0.3)
        elif name.endswith("conv1d.weight"):
            # At initializer_range its output would drown in the norms' epsilon.
            parameter.normal_(0.0, 0.5)
        elif parameter.dim() == 1:
            parameter.normal_(0.0, 0.3)
        elif name.endswith(_RESIDUAL_MATRICES) and not name.startswith("layers.0.linear_attn"):
            # GPT-2's initialisation, all but the first: rounding noise then grows over the layers
            # as little as it does with trained weights, instead of swamping what is compared.
            parameter.mul_((2 * text.config.num_hidden_layers) ** -0.5)
    # The final norm's output has unit scale; tied or not, this is the matrix it meets.
    model.get_output_embeddings().weight.normal_(0.0, LOGIT_STD * hidden_size**-0.5)


def _logit_std(torch: Any, model: Any, seed: int) -> float:
    """Spread of the logits over the vocabulary, the last token's, after 32 random ids."""
    device = model.get_output_embeddings().weight.device
    generator = torch.Generator().manual_seed(seed)
    # Ids below every special token, so that none stands for an image.
    vocabulary = min(model.config.text_config.vocab_size, 1000)
    ids = torch.randint(vocabulary, (1, 32), generator=generator).to(device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return float(logits.float().std())


if __name__ == "__main__":
    sys.exit(main())
