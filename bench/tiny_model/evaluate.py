"""How many held-out questions a tiny model answers rightly, skill by skill and door by door.

    python -m bench.tiny_model.evaluate [--model DIR] [--doors chat,http,forward] [--out FILE]

The exit code is 1 where the model is worse than the project promises.
"""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results_file import why_not_writable, write_results
from bench.tiny_model import doors
from bench.tiny_model.dataset import render_prompt
from bench.tiny_model.doors import Answer
from bench.tiny_model.example import Example
from bench.tiny_model.tasks import SKILLS, check, held_out_set
from qwen35_jax import load_checkpoint
from qwen35_jax.errors import USER_ERRORS, CheckpointError, ConfigError
from qwen35_jax.llm import LLM
from qwen35_jax.model.transformer import parameter_count

DOORS = ("chat", "http", "forward")
# One door's answers, by the example's place in the held-out set.
Answers = Mapping[int, Answer]

# Over the longest right answer.
MAX_TOKENS = 256
FEWEST_TO_JUDGE = 30
MAX_NUM_SEQS = 128


@dataclass(frozen=True)
class Group:
    """Skills that the project makes one promise about: at least this accuracy."""

    skills: tuple[str, ...]
    promise: float


GROUPS = {
    "facts in other words": Group(
        ("capital", "country_of_capital", "currency", "language", "continent"), 0.95
    ),
    "sums and differences": Group(("sum", "difference"), 0.90),
    "tool calls": Group(("tool_call",), 0.95),
    "JSON": Group(("json_facts", "json_record"), 0.95),
}


@dataclass(frozen=True)
class Score:
    """Of so many questions so many answered rightly."""

    asked: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.asked


@dataclass(frozen=True)
class Row:
    """A line of the table. scores: by door. promise: the least accuracy, or None."""

    name: str
    scores: dict[str, Score]
    promise: float | None = None


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.base_url is not None and "http" not in arguments.doors:
        parser.error("--base-url needs the http door")
    try:
        return _evaluate(arguments)
    except USER_ERRORS as error:
        print(f"bench.tiny_model.evaluate: error: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.tiny_model.evaluate",
        description="Held-out accuracy of a tiny model, greedy, by skill. Exits with 1 where a "
        "promise is broken.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint directory (default: the embedded model)"
    )
    parser.add_argument(
        "--doors",
        type=_doors,
        default=DOORS,
        metavar="LIST",
        help="how to ask, with commas between: chat (LLM.chat), http (/v1/completions), forward "
        f"(the plain function, without a cache) (default: {','.join(DOORS)})",
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="a running server of the same model for the http door, such as "
        "http://127.0.0.1:8000 (default: start one on a free port)",
    )
    parser.add_argument(
        "--examples-per-skill",
        type=_positive,
        default=100,
        metavar="N",
        help="questions of each skill (default: %(default)s)",
    )
    parser.add_argument(
        "--forward-per-skill",
        type=_positive,
        default=10,
        metavar="N",
        help="the forward door is slow: ask it only the first N of each (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="which held-out questions (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--commit", help="the code's commit (default: what git says)")
    return parser


def _doors(text: str) -> tuple[str, ...]:
    names = text.split(",")
    unknown = [name for name in names if name not in DOORS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no door {unknown[0]!r}; there are {', '.join(DOORS)}")
    return tuple(name for name in DOORS if name in names)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _evaluate(arguments: argparse.Namespace) -> int:
    problem = arguments.out and why_not_writable(arguments.out)
    if problem:
        raise ConfigError(f"--out {problem}")
    per_skill = arguments.examples_per_skill
    forward_per_skill = min(arguments.forward_per_skill, per_skill)
    examples = held_out_set(per_skill, arguments.seed)
    places: dict[str, Sequence[int]] = dict.fromkeys(arguments.doors, range(len(examples)))
    if "forward" in places:
        places["forward"] = first_places(len(examples), per_skill, forward_per_skill)
    with LLM(arguments.model, max_num_seqs=MAX_NUM_SEQS) as llm:
        print(f"{llm.loaded.model_name}: {llm.loaded.description}", flush=True)
        if arguments.base_url is not None:
            doors.check_server(arguments.base_url, llm.loaded.model_name)
        answered: dict[str, Answers] = {}
        for door in arguments.doors:
            asked = [examples[place] for place in places[door]]
            answers = _ask(door, llm, asked, arguments.base_url)
            answered[door] = dict(zip(places[door], answers, strict=True))
        model = {"name": llm.loaded.model_name, "parameters": parameter_count(llm.params)}
        drafts = _drafts(llm, answered)
    rows = table_rows(examples, answered)
    same = same_texts(answered)
    print(markdown_table(rows), end="\n\n")
    if same is not None:
        print(f"The same text by chat and forward: {same.right} of {same.asked}")
    if drafts is not None:
        print(
            f"First drafts of the multi-token prediction layer accepted: {drafts.right} of "
            f"{drafts.asked}, {drafts.accuracy:.1%}"
        )
    broken = broken_promises(rows)
    kept = "Every promise is kept."
    if per_skill < FEWEST_TO_JUDGE:
        kept += f" So few questions say little: ask {FEWEST_TO_JUDGE} or more of each skill."
    print("\n".join(broken) or kept)
    if arguments.out:
        command = (
            f"python -m bench.tiny_model.evaluate --doors {','.join(arguments.doors)} "
            f"--examples-per-skill {per_skill} --forward-per-skill {forward_per_skill} "
            f"--seed {arguments.seed}"
            + (f" --base-url {arguments.base_url}" if arguments.base_url else "")
            + (" --model DIR" if arguments.model else "")
        )
        flags = {
            "doors": list(arguments.doors),
            "examples_per_skill": per_skill,
            "forward_per_skill": forward_per_skill,
            "seed": arguments.seed,
            "base_url": arguments.base_url,
            "max_tokens": MAX_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
        }
        write_results(
            arguments.out,
            name=arguments.out.stem,
            command=command,
            model=model,
            flags=flags,
            rows=json_rows(rows, same_text=same, drafts=drafts),
            commit=arguments.commit,
        )
    return 1 if broken else 0


def _ask(door: str, llm: LLM, examples: Sequence[Example], base_url: str | None) -> list[Answer]:
    if door == "chat":
        return doors.ask_chat(llm, examples, max_tokens=MAX_TOKENS)
    prompts = [render_prompt(example, llm.chat_template) for example in examples]
    if door == "forward":
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        return doors.ask_forward(llm.params, llm.tokenizer, ids, max_tokens=MAX_TOKENS)
    if base_url is not None:
        return doors.ask_http(base_url, prompts, max_tokens=MAX_TOKENS)
    with doors.serving(llm.loaded) as own_url:
        return doors.ask_http(own_url, prompts, max_tokens=MAX_TOKENS)


def _drafts(llm: LLM, answered: Mapping[str, Answers]) -> Score | None:
    """None where the checkpoint has no multi-token prediction layer, or no door tells its ids."""
    source = answered.get("chat") or answered.get("forward")
    if source is None:
        return None
    try:
        params = load_checkpoint(
            llm.loaded.directory, config=llm.params.config, mtp=True, progress=False
        )
    # The rest of it is loaded already: what is missing is that layer.
    except CheckpointError:
        return None
    accepted, drafted = doors.draft_acceptance(
        params, list(source.values()), vocabulary_size=llm.tokenizer.vocabulary_size
    )
    return Score(drafted, accepted)


def first_places(count: int, per_skill: int, wanted: int) -> list[int]:
    """Where the first `wanted` of each skill's `per_skill` examples are, which stand together."""
    return [place for place in range(count) if place % per_skill < wanted]


def table_rows(examples: Sequence[Example], answered: Mapping[str, Answers]) -> list[Row]:
    """A row for each skill, for each group with a promise, and for all."""
    right = {
        door: {place: check(examples[place], answer.text) for place, answer in answers.items()}
        for door, answers in answered.items()
    }

    def scores(skills: Collection[str]) -> dict[str, Score]:
        by_door = {
            door: [fits for place, fits in of_door.items() if examples[place]["skill"] in skills]
            for door, of_door in right.items()
        }
        return {door: Score(len(fits), sum(fits)) for door, fits in by_door.items()}

    rows = [Row(name, scores((name,))) for name in SKILLS]
    rows += [Row(name, scores(group.skills), group.promise) for name, group in GROUPS.items()]
    return [*rows, Row("overall", scores(SKILLS))]


def same_texts(answered: Mapping[str, Answers]) -> Score | None:
    """How often chat and forward say exactly the same; None unless both were asked."""
    if not {"chat", "forward"} <= answered.keys():
        return None
    same = [
        answered["chat"][place].text == answer.text for place, answer in answered["forward"].items()
    ]
    return Score(len(same), sum(same))


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows with a column a door; one that was asked fewer questions says how many."""
    names = list(rows[0].scores)
    lines = [
        "| " + " | ".join(["skill", "n", *names, "promised"]) + " |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in rows:
        asked = max(score.asked for score in row.scores.values())
        cells = [row.name, str(asked)]
        for score in row.scores.values():
            fewer = f" (of {score.asked})" if score.asked < asked else ""
            cells.append(f"{score.accuracy:.3f}{fewer}")
        cells.append("" if row.promise is None else f"{row.promise:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def broken_promises(rows: Sequence[Row]) -> list[str]:
    """A line for each promise that a door breaks, of the doors that were asked everything."""
    lines = []
    for row in rows:
        asked = max(score.asked for score in row.scores.values())
        lines += [
            f"Broken promise: {row.name} by {door} is {score.accuracy:.3f}, not {row.promise:.2f}"
            for door, score in row.scores.items()
            if row.promise is not None and score.asked == asked and score.accuracy < row.promise
        ]
    return lines


def json_rows(
    rows: Sequence[Row], *, same_text: Score | None, drafts: Score | None
) -> list[dict[str, Any]]:
    """The rows for the results file. Each score is {"n", "right"}."""
    result: list[dict[str, Any]] = []
    for row in rows:
        scores = {door: _as_json(score) for door, score in row.scores.items()}
        result.append({"name": row.name, "promise": row.promise, **scores})
    if same_text is not None:
        result.append({"name": "same text by chat and forward", "both": _as_json(same_text)})
    if drafts is not None:
        result.append({"name": "first drafts accepted", "mtp": _as_json(drafts)})
    return result


def _as_json(score: Score) -> dict[str, int]:
    return {"n": score.asked, "right": score.right}


if __name__ == "__main__":
    sys.exit(main())
