"""The evaluation: rows and groups, the table, promises and exit codes, what is written."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.tiny_model import doors, evaluate
from bench.tiny_model.dataset import render_prompt
from bench.tiny_model.doors import Answer
from bench.tiny_model.evaluate import (
    GROUPS,
    Row,
    Score,
    broken_promises,
    main,
    markdown_table,
    same_texts,
    table_rows,
)
from bench.tiny_model.example import Example
from bench.tiny_model.tasks import SKILLS, held_out_set
from qwen35_jax.chat_template import ChatTemplate
from qwen35_jax.errors import CheckpointError, ConfigError
from tests.support.engines import two_layer_params

PER_SKILL = 3
EXAMPLES = held_out_set(PER_SKILL, seed=0)
OWN_URL = "http://127.0.0.1:1"
PROMPT_IDS = {render_prompt(one, ChatTemplate.built_in()): one for one in EXAMPLES}


@dataclass
class Stub:
    """A model that answers rightly but for `wrong` (skill, door); what it was asked, by door."""

    wrong: set[tuple[str, str]] = field(default_factory=set)
    asked: dict[str, list[Example]] = field(default_factory=dict)
    base_urls: list[str] = field(default_factory=list)
    models: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def answers(self, door: str, examples: Sequence[Example]) -> list[Answer]:
        self.asked[door] = list(examples)
        return [
            Answer("I can't." if (one["skill"], door) in self.wrong else one["target"], [1], [2, 3])
            for one in examples
        ]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Doors that answer with the targets, over a model that isn't there."""
    stub = Stub()

    @contextmanager
    def llm(model: str | None, **options: Any) -> Iterator[Any]:
        stub.models.append((model, options))
        loaded = SimpleNamespace(description="a stub", model_name="stub", directory=Path("stub"))
        # Its tokenizer gives an example's place in the set as its ids.
        places = {prompt: [place] for place, prompt in enumerate(PROMPT_IDS)}
        yield SimpleNamespace(
            loaded=loaded,
            params=two_layer_params(),
            chat_template=ChatTemplate.built_in(),
            tokenizer=SimpleNamespace(encode=places.__getitem__, vocabulary_size=9),
        )

    @contextmanager
    def serving(loaded: Any) -> Iterator[str]:
        yield OWN_URL

    def ask_chat(llm: Any, examples: Sequence[Example], *, max_tokens: int) -> list[Answer]:
        return stub.answers("chat", examples)

    def ask_http(base_url: str, prompts: Sequence[str], *, max_tokens: int) -> list[Answer]:
        stub.base_urls.append(base_url)
        return stub.answers("http", [PROMPT_IDS[prompt] for prompt in prompts])

    def ask_forward(
        params: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int
    ) -> list[Answer]:
        unique = list(PROMPT_IDS.values())
        return stub.answers("forward", [unique[ids[0]] for ids in prompts])

    def load_checkpoint(directory: Path, **options: Any) -> str:
        assert (directory, options["mtp"]) == (Path("stub"), True)
        return "with mtp"

    def draft_acceptance(
        params: Any, answers: Sequence[Answer], *, vocabulary_size: int
    ) -> tuple[int, int]:
        assert (params, vocabulary_size) == ("with mtp", 9)
        return 3, sum(len(answer.ids) for answer in answers)

    monkeypatch.setattr(evaluate, "LLM", llm)
    monkeypatch.setattr(evaluate, "load_checkpoint", load_checkpoint)

    def check_server(base_url: str, model_name: str) -> None:
        assert model_name == "stub"

    for function in (check_server, serving, ask_chat, ask_http, ask_forward, draft_acceptance):
        monkeypatch.setattr(doors, function.__name__, function)
    return stub


@pytest.fixture
def run(stub: Stub, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command on few questions; gives the exit code and what it prints."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["--examples-per-skill", str(PER_SKILL), *arguments])
        return code, capsys.readouterr().out

    return run


def right(door: str, **changes: str) -> dict[int, Answer]:
    """The targets as a door's answers, with other texts for some skills."""
    return {
        place: Answer(changes.get(one["skill"], one["target"]))
        for place, one in enumerate(EXAMPLES)
    }


def test_groups_name_skills_that_there_are_and_what_is_promised():
    for group in GROUPS.values():
        assert set(group.skills) <= SKILLS.keys()
    assert {name: group.promise for name, group in GROUPS.items()} == {
        "facts in other words": 0.95,
        "sums and differences": 0.90,
        "tool calls": 0.95,
        "JSON": 0.95,
    }


def test_there_is_a_row_for_each_skill_each_group_and_all():
    rows = {row.name: row for row in table_rows(EXAMPLES, {"chat": right("chat", sum="no")})}
    assert list(rows) == [*SKILLS, *GROUPS, "overall"]
    count = len(SKILLS) * PER_SKILL
    assert rows["sum"].scores == {"chat": Score(3, 0)}
    assert rows["difference"].scores == {"chat": Score(3, 3)}
    assert rows["sums and differences"].scores == {"chat": Score(6, 3)}
    assert rows["facts in other words"].scores == {"chat": Score(15, 15)}
    assert rows["tool calls"].scores == {"chat": Score(3, 3)}
    assert rows["JSON"].scores == {"chat": Score(6, 6)}
    assert rows["overall"].scores == {"chat": Score(count, count - 3)}
    assert rows["JSON"].promise == 0.95
    assert rows["json_facts"].promise is None


def test_the_table_has_a_column_a_door_and_says_who_was_asked_less():
    rows = [
        Row("sum", {"chat": Score(100, 97), "forward": Score(10, 10)}),
        Row("JSON", {"chat": Score(200, 200), "forward": Score(20, 19)}, 0.95),
    ]
    assert markdown_table(rows).splitlines() == [
        "| skill | n | chat | forward | promised |",
        "|---|---|---|---|---|",
        "| sum | 100 | 0.970 | 1.000 (of 10) |  |",
        "| JSON | 200 | 1.000 | 0.950 (of 20) | 0.95 |",
    ]


@pytest.mark.parametrize(
    ("scores", "broken"),
    [
        ({"chat": Score(100, 95)}, []),
        ({"chat": Score(100, 94)}, ["chat"]),
        ({"chat": Score(100, 94), "http": Score(100, 93)}, ["chat", "http"]),
        ({"chat": Score(100, 95), "forward": Score(10, 9)}, []),
        ({"forward": Score(10, 9)}, ["forward"]),
    ],
)
def test_promises_bind_the_doors_that_were_asked_everything(
    scores: dict[str, Score], broken: list[str]
):
    lines = broken_promises([Row("free", scores), Row("JSON", scores, 0.95)])
    assert lines == [
        f"Broken promise: JSON by {door} is {scores[door].accuracy:.3f}, not 0.95"
        for door in broken
    ]


def test_the_same_texts_are_counted_where_both_doors_answered():
    chat = {0: Answer("a"), 1: Answer("b"), 2: Answer("c")}
    forward = {0: Answer("a"), 2: Answer("d")}
    assert same_texts({"chat": chat, "forward": forward}) == Score(2, 1)
    assert same_texts({"chat": chat, "http": forward}) is None


def test_a_good_model_keeps_every_promise_by_every_door(
    run: Callable[..., tuple[int, str]], stub: Stub
):
    code, printed = run("--forward-per-skill", "1")
    assert code == 0
    count = len(SKILLS) * PER_SKILL
    assert f"| overall | {count} | 1.000 | 1.000 | 1.000 (of {len(SKILLS)}) |  |" in printed
    assert f"The same text by chat and forward: {len(SKILLS)} of {len(SKILLS)}" in printed
    assert f"prediction layer accepted: 3 of {2 * count}, " in printed
    assert printed.splitlines()[-1].startswith("Every promise is kept. So few questions")
    assert stub.asked["chat"] == stub.asked["http"] == EXAMPLES
    assert stub.asked["forward"] == EXAMPLES[::PER_SKILL]
    assert stub.base_urls == [OWN_URL]
    assert stub.models == [(None, {"max_num_seqs": evaluate.MAX_NUM_SEQS})]


@pytest.mark.parametrize("skill", ["capital", "continent", "sum", "tool_call", "json_record"])
@pytest.mark.parametrize("door", ["chat", "http"])
def test_a_broken_promise_is_exit_code_one(
    run: Callable[..., tuple[int, str]], stub: Stub, skill: str, door: str
):
    stub.wrong = {(skill, door)}
    code, printed = run("--doors", "chat,http")
    assert code == 1
    (name,) = [name for name, group in GROUPS.items() if skill in group.skills]
    assert printed.splitlines()[-1].startswith(f"Broken promise: {name} by {door} is 0.")


def test_other_skills_are_no_promise(run: Callable[..., tuple[int, str]], stub: Stub):
    stub.wrong = {("sort_words", "chat")}
    code, printed = run("--doors", "chat")
    assert code == 0
    assert "| sort_words | 3 | 0.000 |  |" in printed


def test_only_the_chosen_doors_are_asked(run: Callable[..., tuple[int, str]], stub: Stub):
    code, printed = run("--doors", "http", "--base-url", "http://example", "--model", "some/where")
    assert code == 0
    assert stub.asked.keys() == {"http"}
    assert stub.base_urls == ["http://example"]
    assert stub.models[0][0] == "some/where"
    # HTTP tells no ids to make drafts of.
    assert "accepted" not in printed and "The same text" not in printed


def test_a_checkpoint_without_the_prediction_layer_has_no_drafts(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
):
    def load_checkpoint(directory: Path, **options: Any) -> None:
        raise CheckpointError("missing mtp.fc.weight")

    monkeypatch.setattr(evaluate, "load_checkpoint", load_checkpoint)
    code, printed = run("--doors", "chat")
    assert code == 0
    assert "accepted" not in printed


def test_results_are_written_also_when_a_promise_is_broken(
    run: Callable[..., tuple[int, str]], stub: Stub, tmp_path: Path
):
    stub.wrong = {("tool_call", "chat")}
    path = tmp_path / "results" / "tiny_model.json"
    code, _ = run("--doors", "forward,chat", "--out", str(path), "--commit", "abc")
    assert code == 1
    content = json.loads(path.read_text())
    assert (content["name"], content["commit"]) == ("tiny_model", "abc")
    assert content["command"] == (
        "python -m bench.tiny_model.evaluate --doors chat,forward --examples-per-skill 3 "
        "--forward-per-skill 3 --seed 0"
    )
    assert content["model"]["name"] == "stub" and content["model"]["parameters"] > 1000
    assert content["flags"]["doors"] == ["chat", "forward"]
    rows = {row.pop("name"): row for row in content["rows"]}
    assert rows["tool calls"] == {
        "promise": 0.95,
        "chat": {"n": 3, "right": 0},
        "forward": {"n": 3, "right": 3},
    }
    count = len(EXAMPLES)
    assert rows["same text by chat and forward"] == {"both": {"n": count, "right": count - 3}}
    assert rows["first drafts accepted"] == {"mtp": {"n": 2 * count, "right": 3}}


def test_what_the_user_can_mend_is_one_line_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def llm(model: str | None, **options: Any) -> None:
        raise ConfigError("no such directory")

    monkeypatch.setattr(evaluate, "LLM", llm)
    assert main(["--examples-per-skill", "1"]) == 2
    assert capsys.readouterr().err == "bench.tiny_model.evaluate: error: no such directory\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--doors", "chat,window"], "no door 'window'; there are chat, http, forward"),
        (["--doors", ""], "no door ''"),
        (["--examples-per-skill", "0"], "must be at least 1, not 0"),
        (["--doors", "chat", "--base-url", "http://x"], "--base-url needs the http door"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
