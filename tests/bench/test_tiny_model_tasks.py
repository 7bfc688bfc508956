"""The tasks: right targets, a held-out split that training never shows, the same for a seed."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tiny_model.example import Example, Split
from bench.tiny_model.fact_tasks import FACTS, FOLLOW_UPS, known_countries
from bench.tiny_model.number_tasks import difference_working, sum_working
from bench.tiny_model.splits import HELD_OUT_OPERANDS, operands_fit, pair_fits, phrasings_of
from bench.tiny_model.tasks import SKILLS, check, generate, held_out_set, stream
from bench.tiny_model.unit_tasks import CONVERSIONS

SPLITS: tuple[Split, ...] = ("train", "held_out")
ROOT = Path(__file__).resolve().parents[2]


def examples(skill: str, split: Split, count: int) -> Iterator[Example]:
    random_source = random.Random(f"test:{skill}:{split}")
    return (generate(skill, split, random_source) for _ in range(count))


@pytest.mark.parametrize("skill", SKILLS)
def test_every_target_is_right_by_its_own_checker(skill: str):
    for split in SPLITS:
        for example in examples(skill, split, 150):
            assert example["skill"] == skill
            assert check(example, example["target"]), example
            assert check(example, example["target"] + "<|im_end|>"), example


@pytest.mark.parametrize("skill", SKILLS)
def test_the_target_of_another_answer_is_wrong(skill: str):
    # Small talk has one answer a skill: there the other target comes from another skill.
    fixed = skill in ("greeting", "thanks", "goodbye", "identity", "abilities", "out_of_scope")
    others = list(examples("capital" if fixed else skill, "train", 60))
    compared = 0
    for example in examples(skill, "held_out", 20):
        for other in others:
            if example["answer"] == other["answer"]:
                continue
            if example["enable_thinking"] != other["enable_thinking"]:
                continue
            if example["answer"]["kind"] == other["answer"]["kind"] and (
                _value(example) == _value(other)
            ):
                continue
            compared += 1
            assert not check(example, other["target"]), (example, other["target"])
    assert compared > 50


def _value(example: Example) -> object:
    answer = example["answer"]
    return answer.get("value", (answer.get("name"), answer.get("arguments")))


@pytest.mark.parametrize("skill", SKILLS)
def test_a_text_that_is_cut_off_is_wrong(skill: str):
    for example in examples(skill, "held_out", 40):
        target = example["target"]
        assert not check(example, "")
        if example["enable_thinking"]:
            assert not check(example, target.partition("</think>")[0])
            assert not check(example, target.replace("</think>", ""))
        if example["answer"]["kind"] != "tool_call":
            assert not check(example, target + "\n\n<tool_call>\n<function=x>\n</function>\n")


def test_no_held_out_question_is_asked_in_training():
    asked: dict[str, set[str]] = defaultdict(set)
    for example in islice(stream("train", 5), 25_000):
        asked[example["skill"]].add(_question(example))
    assert min(map(len, asked.values())) > 50
    for example in held_out_set(150, seed=5):
        skill, question = example["skill"], _question(example)
        assert question not in asked[skill], (skill, question)


def _question(example: Example) -> str:
    return [message for message in example["messages"] if message["role"] == "user"][-1]["content"]


def test_no_held_out_pair_of_operands_is_in_training():
    for skill in ("sum", "difference"):
        for split in SPLITS:
            for example in examples(skill, split, 400):
                first, second = example["answer"]["operands"]
                assert pair_fits(split, first, second)
                assert pair_fits(split, second, first)
                other = "train" if split == "held_out" else "held_out"
                assert not pair_fits(other, first, second)


def test_a_tenth_of_the_operands_is_held_out():
    held_out = sum(pair_fits("held_out", a, b) for a in range(100, 200) for b in range(200, 300))
    assert held_out == pytest.approx(10_000 / HELD_OUT_OPERANDS, rel=0.1)
    for values in (conversion.values for conversion in CONVERSIONS if not conversion.few):
        assert any(operands_fit("held_out", value) for value in values)


def test_every_fact_is_trained_in_most_phrasings_and_held_out_in_some():
    for fact in FACTS:
        for country in known_countries(fact):
            for phrasings in (fact.phrasings, FOLLOW_UPS):
                key = (fact.skill, country.code, phrasings is FOLLOW_UPS)
                trained = phrasings_of("train", key, phrasings)
                held_out = phrasings_of("held_out", key, phrasings)
                assert len(trained) >= 0.8 * len(phrasings)
                assert held_out
                assert set(trained) | set(held_out) == set(phrasings)
                assert not set(trained) & set(held_out)


def test_every_phrasing_is_trained_with_some_fact():
    for fact in FACTS:
        trained = {
            phrasing
            for country in known_countries(fact)
            for phrasing in phrasings_of("train", (fact.skill, country.code, False), fact.phrasings)
        }
        assert trained == set(fact.phrasings)
        assert len(fact.phrasings) == len(set(fact.phrasings)) >= 12


@given(st.integers(0, 999), st.integers(0, 999))
def test_the_working_of_sums_and_differences_holds_line_by_line(first: int, second: int):
    for working, result in (
        (sum_working(first, second), first + second),
        (difference_working(first, second), first - second),
    ):
        assert working.splitlines()[-1] == f"result: {result}"
        lines = re.findall(
            r"(\d+)([+-])(\d+)[+-]([01])=(\d+), write (\d), (?:carry|borrow)", working
        )
        assert len(lines) == max(len(str(first)), len(str(second)))
        for a, sign, b, carry, total, digit in lines:
            total_is = int(a) + int(b) + int(carry) if sign == "+" else int(a) - int(b) - int(carry)
            assert total_is == int(total)
            assert int(digit) == total_is % 10


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda one: one.source.sign)
def test_conversions_are_exact_and_their_working_ends_in_the_result(conversion):
    factors = {"km": 1000, "kg": 1000, "h": 60, "m": 1 / 1000, "g": 1 / 1000, "min": 1 / 60}
    for value in conversion.values:
        working, result = conversion.working(value)
        assert isinstance(result, int)
        assert re.findall(r"-?\d+", working)[-1] == str(result)
        if conversion.source.sign == "°C":
            assert result == value * 9 / 5 + 32
        elif conversion.source.sign == "°F":
            assert value == pytest.approx(result * 9 / 5 + 32)
        else:
            assert result == pytest.approx(value * factors[conversion.source.sign])


def test_a_seed_gives_the_same_examples_in_every_process():
    code = (
        "import json; from itertools import islice; from bench.tiny_model.tasks import *; "
        "print(json.dumps([*islice(stream('train', 3), 150), *held_out_set(2, seed=3)]))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    here = [*islice(stream("train", 3), 150), *held_out_set(2, seed=3)]
    assert json.loads(outputs[0]) == here
    assert here[:150] != list(islice(stream("train", 4), 150))


def test_the_mixture_follows_the_weights_and_has_every_kind_of_conversation():
    drawn = list(islice(stream("train", 1), 4000))
    counts = Counter(example["skill"] for example in drawn)
    total = sum(skill.weight for skill in SKILLS.values())
    assert counts.keys() == SKILLS.keys()
    for name, skill in SKILLS.items():
        assert counts[name] == pytest.approx(4000 * skill.weight / total, rel=0.35, abs=15)
    thinking = sum(example["enable_thinking"] for example in drawn) / len(drawn)
    assert 0.6 < thinking < 0.7
    assert any(example["messages"][0]["role"] == "system" for example in drawn)
    turns = [sum(message["role"] == "user" for message in one["messages"]) for one in drawn]
    assert set(turns) == {1, 2}


def test_without_thinking_only_easy_answers_come_without_working():
    for skill in ("sum", "difference"):
        for example in examples(skill, "train", 300):
            if not example["enable_thinking"]:
                hard = max(example["answer"]["operands"]) > 9
                assert ("ones:" in example["target"]) == hard


def test_a_held_out_set_has_as_many_of_every_skill_and_keeps_them():
    drawn = held_out_set(3, seed=1)
    assert [example["skill"] for example in drawn] == [name for name in SKILLS for _ in range(3)]
    assert drawn == held_out_set(3, seed=1)
    assert drawn != held_out_set(3, seed=2)
