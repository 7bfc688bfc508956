"""The static-batch engine: each request gets what it gets alone, and ends exactly once."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.engine import static_batch
from qwen35_jax.engine.request import Request, TokenOutput
from qwen35_jax.engine.static_batch import StaticBatchEngine
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.model.transformer import forward
from qwen35_jax.step import Step
from tests.support.engines import (
    Outputs,
    fast_compilation,
    ids_of,
    log_softmax,
    request,
    run,
    shared_step,
    two_layer_params,
)
from tests.support.models import COMPILE_FAST

VOCABULARY_SIZE = 77  # of the 80 that the model has logits for
CONTEXT = 64

PROMPTS = {"a": (3,), "b": (5, 6, 7, 8, 9), "c": tuple(range(20, 32)), "d": tuple(range(40))}
LIMITS = {"a": 9, "b": 3, "c": 1, "d": 6}

OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand much more")


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


def make_engine(**options: Any) -> StaticBatchEngine:
    """A fresh engine."""
    fields: dict[str, Any] = {
        "params": two_layer_params(),
        "vocabulary_size": VOCABULARY_SIZE,
        "max_model_len": CONTEXT,
        "max_num_seqs": 4,
        "stop_token_ids": frozenset(),
    }
    engine = StaticBatchEngine(**fields | options)
    engine._step = shared_step(engine.params, engine.vocabulary_size)
    return engine


def four_requests(**params: Any) -> list[Request]:
    return [
        request(name, prompt, max_tokens=LIMITS[name], **params) for name, prompt in PROMPTS.items()
    ]


def alone(one: Request) -> list[int]:
    return ids_of(run(make_engine(), one)[one.request_id])


def finishes(outputs: Outputs) -> dict[str, list[str | None]]:
    return {name: [output.finish_reason for output in these] for name, these in outputs.items()}


@cache
def jitted_forward() -> Any:
    return jax.jit(forward, compiler_options=COMPILE_FAST)


def full_logits(ids: list[int]) -> np.ndarray:
    """forward()'s logits at every position of `ids`."""
    padded = jnp.asarray(ids + [0] * (CONTEXT - len(ids)))[None]
    return np.asarray(jitted_forward()(two_layer_params(), padded)[0, : len(ids)])


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_ids_are_those_of_the_plain_forward(name: str):
    prompt = PROMPTS[name]
    ids = alone(request(name, prompt, max_tokens=9))
    logits = full_logits([*prompt, *ids])[len(prompt) - 1 : -1, :VOCABULARY_SIZE]
    assert ids == list(logits.argmax(-1))


def test_a_batch_gives_each_request_what_it_gets_alone():
    together = run(make_engine(), *four_requests())
    assert {name: ids_of(outputs) for name, outputs in together.items()} == {
        one.request_id: alone(one) for one in four_requests()
    }


def test_a_prompt_in_pieces_gives_what_it_gives_whole(monkeypatch: pytest.MonkeyPatch):
    whole = run(make_engine(), *four_requests())
    monkeypatch.setattr(static_batch, "PREFILL_TOKENS", 16)
    widths: list[int] = []
    prefill = Step.prefill

    def recorded(self: Step, state: Any, logits: Any, ids: Any, lengths: Any) -> Any:
        widths.append(ids.shape[1])
        return prefill(self, state, logits, ids, lengths)

    monkeypatch.setattr(Step, "prefill", recorded)
    assert run(make_engine(), *four_requests()) == whole
    assert widths == [16, 16, 16]


def test_a_finished_row_that_rides_past_the_caches_end_harms_no_one(
    monkeypatch: pytest.MonkeyPatch,
):
    full = request("full", tuple(range(1, 61)), max_tokens=3)
    longer = request("longer", PROMPTS["a"], max_tokens=9)
    expected = {"full": alone(full), "longer": alone(longer)}
    # Both fit 64 tokens, but the full one would be at 69 when the longer one ends.
    monkeypatch.setattr(static_batch, "MIN_CAPACITY", 1)
    outputs = run(make_engine(), full, longer)
    assert {name: ids_of(these) for name, these in outputs.items()} == expected


def test_every_row_with_one_prompt_gives_the_same_ids_at_any_concurrency():
    expected = alone(request("0", PROMPTS["b"], max_tokens=5))
    for count in (2, 3, 4):
        same = [request(str(row), PROMPTS["b"], max_tokens=5) for row in range(count)]
        outputs = run(make_engine(), *same)
        assert [ids_of(outputs[one.request_id]) for one in same] == [expected] * count


def test_the_second_batch_equals_a_fresh_engines():
    engine = make_engine(max_num_seqs=1)
    params = {"max_tokens": 6, "logprobs": 3}
    run(engine, request("first", PROMPTS["d"], **params))
    second = request("second", PROMPTS["b"], **params)
    assert run(engine, second) == run(make_engine(max_num_seqs=1), second)


def test_requests_beyond_max_num_seqs_wait_and_then_run():
    requests = [request(str(row), (row, row + 1), max_tokens=3) for row in range(6)]
    engine = make_engine()
    outputs = run(engine, *requests)
    assert list(outputs) == [one.request_id for one in requests]
    assert {name: ids_of(these) for name, these in outputs.items()} == {
        one.request_id: alone(one) for one in requests
    }


def test_the_step_that_takes_a_batch_takes_no_more_than_max_num_seqs():
    engine = make_engine(max_num_seqs=2)
    for row in range(3):
        engine.submit(request(str(row), (1, 2), max_tokens=2))
    assert [output.request_id for output in engine.step()] == ["0", "1"]


def test_max_tokens_ends_as_length_on_the_last_token_only():
    outputs = run(make_engine(), *four_requests())
    assert finishes(outputs) == {
        name: [None] * (limit - 1) + ["length"] for name, limit in LIMITS.items()
    }
    assert all(len(output.token_ids) == 1 for these in outputs.values() for output in these)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_context_end_is_length(max_tokens: int | None):
    outputs = run(make_engine(), request("a", PROMPTS["d"], max_tokens=max_tokens))
    assert len(ids_of(outputs["a"])) == CONTEXT - len(PROMPTS["d"])
    assert outputs["a"][-1].finish_reason == "length"


def first_ids() -> list[int]:
    return alone(request("a", PROMPTS["a"], max_tokens=9))


def test_the_checkpoints_stop_id_ends_the_request_and_is_its_last_id():
    ids = first_ids()
    stop = ids[3]
    engine = make_engine(stop_token_ids=frozenset({stop}))
    outputs = run(engine, request("a", PROMPTS["a"], max_tokens=9, ignore_eos=False))
    assert ids_of(outputs["a"]) == ids[: ids.index(stop) + 1]
    assert (outputs["a"][-1].finish_reason, outputs["a"][-1].stop_reason) == ("stop", stop)


def test_ignore_eos_goes_on_past_the_checkpoints_stop_id_but_not_past_the_requests_own():
    ids = first_ids()
    engine = make_engine(stop_token_ids=frozenset({ids[0]}))
    assert ids_of(run(engine, request("a", PROMPTS["a"], max_tokens=9))["a"]) == ids
    own = run(engine, request("a", PROMPTS["a"], max_tokens=9, stop_token_ids=[ids[4]]))["a"]
    assert ids_of(own) == ids[: ids.index(ids[4]) + 1]
    assert (own[-1].finish_reason, own[-1].stop_reason) == ("stop", ids[4])


def test_a_stop_id_at_the_limit_is_stop():
    ids = first_ids()
    one = request("a", PROMPTS["a"], max_tokens=1, stop_token_ids=[ids[0]])
    assert run(make_engine(), one)["a"][-1].finish_reason == "stop"


def test_abort_of_a_queued_request_leaves_the_others_alone():
    requests = four_requests()
    engine = make_engine(max_num_seqs=1)
    for one in requests:
        engine.submit(one)
    engine.abort("b")
    outputs = run(engine)
    assert finishes(outputs)["b"] == ["abort"]
    assert ids_of(outputs["d"]) == alone(requests[3])


def test_abort_of_a_running_request_leaves_its_batch_alone():
    requests = four_requests()
    engine = make_engine()
    for one in requests:
        engine.submit(one)
    first = engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    later = run(engine)
    assert finishes(later)["a"] == ["abort"]
    before = [
        token_id for output in first if output.request_id == "d" for token_id in output.token_ids
    ]
    assert before + ids_of(later["d"]) == alone(requests[3])


def test_abort_of_the_last_running_request_ends_the_batch_without_another_step(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = make_engine()
    engine.submit(request("a", (1,), max_tokens=9))
    engine.step()
    engine.abort("a")
    monkeypatch.setattr(Step, "decode", None)
    assert engine.step() == [TokenOutput("a", finish_reason="abort")]
    assert not engine.has_work()


def test_an_ended_batch_leaves_no_work_and_no_device_memory():
    before = sum(array.nbytes for array in jax.live_arrays())
    engine = make_engine()
    run(engine, request("a", (1,), max_tokens=1))
    assert sum(array.nbytes for array in jax.live_arrays()) == before
    assert engine.step() == []


def test_close_ends_everything_as_abort():
    engine = make_engine(max_num_seqs=1)
    for one in four_requests():
        engine.submit(one)
    engine.step()
    engine.close()
    assert finishes(run(engine)) == {name: ["abort"] for name in PROMPTS}
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("prompt", "code", "parts"),
    [
        ((), None, ["prompt is empty"]),
        ((1,) * CONTEXT, "context_length_exceeded", [f"{CONTEXT} tokens", f"holds {CONTEXT}"]),
        ((1,) * 100, "context_length_exceeded", ["100 tokens", f"holds {CONTEXT}"]),
        ((1, VOCABULARY_SIZE), None, [f"id {VOCABULARY_SIZE}", f"has {VOCABULARY_SIZE} ids"]),
        ((-1, 1), None, ["id -1"]),
        ((10**30,), None, [f"id {10**30}"]),
    ],
    ids=["empty", "one_over", "far_over", "out_of_range", "negative", "huge"],
)
def test_prompts_that_cannot_run_are_refused(
    prompt: tuple[int, ...], code: str | None, parts: list[str]
):
    engine = make_engine()
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit(request("a", prompt))
    assert (refused.value.param, refused.value.code) == ("prompt", code)
    assert all(part in str(refused.value) for part in parts)
    assert not engine.has_work()


@pytest.mark.parametrize(
    "option",
    [
        {"n": 2},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1}},
        {"prompt_logprobs": 0},
    ],
    ids=str,
)
def test_options_without_effect_here_are_refused_by_name(option: dict[str, Any]):
    engine = make_engine()
    (name,) = option
    with pytest.raises(InvalidRequestError, match=f"^{name} is not supported yet") as refused:
        engine.submit(request("a", (1,), **option))
    assert refused.value.param == name
    assert not engine.has_work()


def test_a_prompt_that_leaves_room_for_one_token_runs():
    outputs = run(make_engine(), request("a", (1,) * (CONTEXT - 1), max_tokens=5))
    assert finishes(outputs) == {"a": ["length"]}


@pytest.mark.parametrize("failing", ["prefill", "sample", "decode", "init_state"])
def test_a_device_failure_ends_its_batch_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, failing: str
):
    requests = four_requests()
    engine = make_engine(max_num_seqs=2)
    for one in requests[:3]:
        engine.submit(one)

    def fail(*_: object, **__: object) -> None:
        raise OUT_OF_MEMORY

    with monkeypatch.context() as patch:
        patch.setattr(static_batch if failing == "init_state" else Step, failing, fail)
        outputs = engine.step()
        if failing == "decode":
            assert [output.finish_reason for output in outputs] == [None, None]
            outputs = engine.step()
    message = "the device failed: RESOURCE_EXHAUSTED: out of memory"
    assert outputs == [
        TokenOutput(name, finish_reason="error", error=message) for name in ("a", "b")
    ]
    assert ids_of(run(engine)["c"]) == alone(requests[2])


def test_a_failure_without_a_message_still_ends_the_batch(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("")

    monkeypatch.setattr(Step, "prefill", fail)
    assert finishes(run(make_engine(), *four_requests())) == {name: ["error"] for name in PROMPTS}


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_logprobs_are_the_raw_models_at_any_temperature(temperature: float):
    params = {"temperature": temperature, "max_tokens": 5, "seed": 1}
    outputs = run(make_engine(), request("a", PROMPTS["b"], logprobs=3, **params))["a"]
    ids = ids_of(outputs)
    expected = log_softmax(full_logits([*PROMPTS["b"], *ids])[len(PROMPTS["b"]) - 1 : -1])
    for token_id, output, row in zip(ids, outputs, expected, strict=True):
        assert output.logprobs is not None
        (logprobs,) = output.logprobs
        assert logprobs.token == pytest.approx(row[token_id], abs=1e-3)
        best = np.argsort(-row[:VOCABULARY_SIZE])[:3]
        assert [top_id for top_id, _ in logprobs.top] == list(best)
        assert [value for _, value in logprobs.top] == pytest.approx(row[best], abs=1e-3)


def test_logprobs_come_only_to_those_who_asked_and_as_many_as_asked():
    outputs = run(
        make_engine(),
        request("none", (1,), max_tokens=2),
        request("zero", (1,), max_tokens=2, logprobs=0),
        request("twenty", (1,), max_tokens=2, logprobs=20),
    )
    counts = {
        name: [one and [len(entry.top) for entry in one] for one in (o.logprobs for o in these)]
        for name, these in outputs.items()
    }
    assert counts == {"none": [None, None], "zero": [[0], [0]], "twenty": [[20], [20]]}


SAMPLED = {"temperature": 1.0, "max_tokens": 6}


def test_a_seed_gives_the_same_tokens_in_any_batch():
    seeded = request("a", PROMPTS["a"], seed=7, **SAMPLED)
    neighbours = [
        request("b", PROMPTS["b"], seed=8, top_k=3, **SAMPLED),
        request("c", PROMPTS["c"], max_tokens=4),
    ]
    expected = alone(seeded)
    assert ids_of(run(make_engine(), *neighbours, seeded)["a"]) == expected
    assert ids_of(run(make_engine(), seeded, *neighbours)["a"]) == expected
    others = [alone(request("a", PROMPTS["a"], seed=seed, **SAMPLED)) for seed in (8, -7, 7 << 32)]
    assert expected not in others


def test_requests_without_a_seed_follow_the_engines_seed():
    requests = [request(str(row), PROMPTS["a"], **SAMPLED) for row in range(4)]
    first, again, other = (run(make_engine(seed=seed), *requests) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({tuple(ids_of(outputs)) for outputs in first.values()}) == 4


@pytest.mark.parametrize("temperature", [1e-320, 1e-42, 1e300])
def test_extreme_temperatures_give_valid_ids(temperature: float):
    requests = [
        request(str(row), PROMPTS["a"], temperature=temperature, max_tokens=3, seed=row)
        for row in range(4)
    ]
    outputs = run(make_engine(), *requests)
    ids = [ids_of(these) for these in outputs.values()]
    assert all(0 <= token_id < VOCABULARY_SIZE for these in ids for token_id in these)
    if temperature < 1:
        assert ids == [first_ids()[:3]] * 4
    else:
        # Uniform: only the noise decides, which is each row's and each step's own.
        assert len({tuple(these) for these in ids}) == 4
        assert all(len(set(these)) > 1 for these in ids)
