"""Write the README's tables from the JSON in bench/results: `python -m bench.readme_tables`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.tiny_model.tasks import SKILLS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(with_tables(text), encoding="utf-8")
    return 0


def with_tables(text: str) -> str:
    """`text` with what stands between each pair of markers made anew."""
    for name, make in TABLES.items():
        run = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        block = f"<!-- {name} -->\n{make(run)}\n<!-- /{name} -->"
        text, count = re.subn(
            f"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"README.md has {count} blocks named {name}, not one")
    return text


def _where(run: dict[str, Any]) -> str:
    return (
        f"{run['device']}, jax {run['versions']['jax']}, {run['date']}: `{run['command']}`, "
        f"[bench/results/{run['name']}.json](bench/results/{run['name']}.json)."
    )


def _accuracy(run: dict[str, Any]) -> str:
    lines = [
        f"{run['model']['config'].removesuffix('.json')} at full size ({run['model']['weights']}) "
        f"against {', '.join(run['flags']['reference'])}; {_where(run)}",
        "",
        "| prompt tokens | compared | steps | same token | regret | mean | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        stage = "end of the prompt" if row["stage"] == "prompt" else "greedy continuation"
        lines.append(
            f"| {row['prompt_tokens']} | {stage} | {row['positions']} | {row['same_tokens']} "
            f"| {row['regret']:.3f} | {row['mean']:.3f} | {row['p99']:.3f} |"
        )
    return "\n".join(lines)


def _load(run: dict[str, Any]) -> str:
    lines = [
        _where(run),
        "",
        "| load | seconds | GB/s | weights | device peak | host memory that loading adds |",
        "|---|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        peak = row["device_peak_bytes"]
        lines.append(
            f"| {row['load']} | {row['seconds']:.1f} | {row['gb_per_s']:.1f} "
            f"| {row['weight_bytes'] / 1e9:.2f} GB | {peak / 1e9 if peak else 0:.2f} GB "
            f"| {(row['host_own_bytes'] - row['host_own_bytes_before']) / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def _tiny_model(run: dict[str, Any]) -> str:
    doors = run["flags"]["doors"]
    few = f"forward, the first {run['flags']['forward_per_skill']}"
    headings = [few if door == "forward" else door for door in doors]
    lines = [
        "Questions of the training's phrasings and sizes, held out of it, answered right (greedy). "
        f"Skills not listed here are at 99 % or more by chat. {_where(run)}",
        "",
        f"| skill | questions | {' | '.join(headings)} |",
        f"|---|---|{'---|' * len(doors)}",
    ]
    for row in run["rows"]:
        asked = [row[door] for door in doors if door in row]
        if not asked:
            continue
        is_group = row["name"] not in SKILLS
        if not is_group and row["chat"]["right"] >= 0.99 * row["chat"]["n"]:
            continue
        cells = [f"{_share(row[door])}" if door in row else "" for door in doors]
        lines.append(f"| {row['name']} | {max(one['n'] for one in asked)} | {' | '.join(cells)} |")
    drafts = next((row["mtp"] for row in run["rows"] if "mtp" in row), None)
    same = next((row["both"] for row in run["rows"] if "both" in row), None)
    if same:
        lines += [
            "",
            f"`LLM.chat` and the plain `forward` loop gave the same text for {same['right']} of "
            f"{same['n']} questions.",
        ]
    if drafts:
        lines += [
            "",
            f"The multi-token prediction layer's first draft is the model's own next token "
            f"{drafts['right'] / drafts['n']:.1%} of the time ({drafts['n']} tokens of answers).",
        ]
    return "\n".join(lines)


def _share(door: dict[str, int]) -> str:
    return f"{100 * door['right'] / door['n']:.1f} %"


def _tiny_model_training(run: dict[str, Any]) -> str:
    rows = run["rows"]
    shown = [row for row in rows if row["step"] in (100, 500, 1000, 2000, 3000)] + [rows[-1]]
    lines = [
        f"{run['model']['parameters']:,} parameters, {run['flags']['examples']:,} conversations; "
        f"{_where(run)}",
        "",
        "| step | loss (nats) | draft loss | tokens/s, padding included |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['step']} | {row['loss']:.3f} | {row['mtp_loss']:.3f} "
        f"| {row['tokens_per_s']:,.0f} |"
        for row in shown
    ]
    return "\n".join(lines)


TABLES = {
    "accuracy": _accuracy,
    "load": _load,
    "tiny_model": _tiny_model,
    "tiny_model_training": _tiny_model_training,
}


if __name__ == "__main__":
    sys.exit(main())
