"""Prompts on their way through an engine: the right choice, text and error for each of them."""

from dataclasses import replace
from typing import Any

import pytest

from qwen35_jax.engine.fake import FakeEngine
from qwen35_jax.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from qwen35_jax.engine.shared import SharedEngine
from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.generation_batch import GenerationBatch
from qwen35_jax.outputs import RequestOutput
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import END_OF_TURN_ID, VOCABULARY_SIZE, write_tiny_tokenizer

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return Tokenizer.from_directory(directory)


class ScriptedEngine(FakeEngine):
    """Each step gives the next of `steps`, whatever was submitted, and refuses ids in `refused`."""

    def __init__(self, *steps: list[TokenOutput], refused: tuple[str, ...] = ()):
        super().__init__(vocabulary_size=VOCABULARY_SIZE)
        self._steps_to_come = list(steps)
        self._refused = refused
        self.submitted: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        if request.request_id in self._refused:
            raise InvalidRequestError(f"{request.request_id} is refused", param="prompt")
        self.submitted.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self._steps_to_come)

    def step(self) -> list[TokenOutput]:
        return self._steps_to_come.pop(0)


def output(
    name: str, ids: list[int], finish: FinishReason | None = None, **fields: Any
) -> TokenOutput:
    return TokenOutput(name, tuple(ids), finish_reason=finish, **fields)


def generate(
    tokenizer: Tokenizer,
    engine: FakeEngine,
    *asked: tuple[Any, SamplingParams],
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """The prompts get the ids "0", "1", ..."""
    batch = GenerationBatch(tokenizer)
    with SharedEngine(engine).inbox() as inbox:
        for number, (prompt, params) in enumerate(asked):
            batch.submit(inbox, str(number), prompt, params)
        batch.run(inbox, use_tqdm)
    return batch.outputs()


def test_results_are_in_the_prompts_order_and_choices_in_their_own(tokenizer: Tokenizer):
    # What ends first was submitted last.
    engine = ScriptedEngine(
        [output("1", [3], "length"), output("0-2", [30, 31])],
        [output("0-1", [20, 21], "length"), output("0-2", [32], "stop", stop_reason=32)],
        [output("0-0", [10]), output("0-0", [11], "length")],
    )
    several, one = generate(
        tokenizer, engine, ("hello", replace(PARAMS, n=3, seed=8)), ([7, 8], PARAMS)
    )
    assert [request.request_id for request in engine.submitted] == ["0-0", "0-1", "0-2", "1"]
    assert [request.params.seed for request in engine.submitted] == [8, 9, 10, None]
    assert [request.params.n for request in engine.submitted] == [1, 1, 1, 1]
    assert (several.request_id, several.prompt) == ("0", "hello")
    assert several.prompt_token_ids == tokenizer.encode("hello")
    assert (one.request_id, one.prompt, one.prompt_token_ids) == ("1", None, [7, 8])
    found = [(c.index, c.token_ids, c.finish_reason, c.stop_reason) for c in several.outputs]
    assert found == [
        (0, [10, 11], "length", None),
        (1, [20, 21], "length", None),
        (2, [30, 31, 32], "stop", 32),
    ]
    assert [choice.token_ids for choice in one.outputs] == [[3]]
    assert engine.aborted == []


def test_a_stop_string_ends_its_choice_in_the_engine_and_no_other(tokenizer: Tokenizer):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    engine = ScriptedEngine(
        [output("0-0", [a]), output("0-1", [a])],
        [output("0-0", [b]), output("0-1", [c])],
        # On its way when the stop string was found.
        [output("0-0", [c]), output("0-1", [c], "length")],
    )
    (result,) = generate(tokenizer, engine, ("x", replace(PARAMS, n=2, stop="b")))
    found = [(one.text, one.token_ids, one.finish_reason) for one in result.outputs]
    assert found == [("a", [a, b], "stop"), ("acc", [a, c, c], "length")]
    assert result.outputs[0].stop_reason == "b"
    assert engine.aborted == ["0-0"]


def test_a_stop_string_in_the_last_output_aborts_nothing(tokenizer: Tokenizer):
    (b,) = tokenizer.encode("b")
    engine = ScriptedEngine([output("0", [b], "length")])
    (result,) = generate(tokenizer, engine, ("x", replace(PARAMS, stop="b")))
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("", "stop")
    assert engine.aborted == []


def test_of_a_hundred_prompts_the_one_over_the_limit_fails_alone(tokenizer: Tokenizer):
    prompts: list[list[int]] = [[number, 7] for number in range(100)]
    prompts[41] = [1] * 64
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE, max_model_len=64, max_num_seqs=8)
    results = generate(tokenizer, engine, *((prompt, PARAMS) for prompt in prompts))
    assert [result.prompt_token_ids for result in results] == prompts
    failed = [number for number, result in enumerate(results) if result.error is not None]
    assert failed == [41] and results[41].outputs == []
    assert "64 tokens" in (results[41].error or "")
    assert {len(result.outputs[0].token_ids) for result in results if not result.error} == {4}


def test_a_prompt_whose_second_choice_is_refused_runs_none(tokenizer: Tokenizer):
    engine = ScriptedEngine([output("1", [5], "length")], refused=("0-1",))
    refused, good = generate(tokenizer, engine, ("x", replace(PARAMS, n=3)), ("y", PARAMS))
    assert (refused.outputs, refused.error) == ([], "0-1 is refused")
    assert engine.aborted == ["0-0"]
    assert [request.request_id for request in engine.submitted] == ["0-0", "1"]
    assert good.error is None and good.outputs[0].token_ids == [5]


@pytest.mark.parametrize("prompt", ["", [], None, [1.5], "\ud800"], ids=repr)
def test_what_is_no_prompt_is_an_error_of_its_own(tokenizer: Tokenizer, prompt: Any):
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE)
    bad, good = generate(tokenizer, engine, (prompt, PARAMS), ("y", PARAMS))
    assert bad.outputs == [] and bad.error and "\n" not in bad.error
    assert len(good.outputs[0].token_ids) == 4


def test_a_choice_that_fails_is_its_prompts_error(tokenizer: Tokenizer):
    engine = ScriptedEngine(
        [output("0-0", [5], "error", error="the device failed"), output("1", [6], "length")],
        [output("0-1", [7], "length")],
    )
    failed, good = generate(tokenizer, engine, ("x", replace(PARAMS, n=2)), ("y", PARAMS))
    assert (failed.outputs, failed.error) == ([], "the device failed")
    assert failed.prompt_logprobs is None
    assert good.error is None


def test_what_the_engine_loses_is_an_error_and_not_a_wait(tokenizer: Tokenizer):
    engine = ScriptedEngine([output("0", [5]), output("1", [6], "length")])
    lost, good = generate(tokenizer, engine, ("x", PARAMS), ("y", PARAMS))
    assert (lost.outputs, lost.error) == ([], "the engine lost this request")
    assert good.error is None


def test_logprobs_are_as_many_as_ids_and_only_where_asked_for(tokenizer: Tokenizer):
    entries = tuple(TokenLogprobs(-float(place), ()) for place in range(3))
    engine = ScriptedEngine(
        [output("0", [5, 6], logprobs=entries[:2]), output("1", [6], "length")],
        [output("0", [END_OF_TURN_ID], "stop", logprobs=entries[2:])],
    )
    asked, plain = generate(tokenizer, engine, ("x", replace(PARAMS, logprobs=0)), ("y", PARAMS))
    assert asked.outputs[0].logprobs == list(entries)
    assert plain.outputs[0].logprobs is None


def test_prompt_logprobs_are_asked_for_once_and_are_the_prompts(tokenizer: Tokenizer):
    entries = (None, TokenLogprobs(-1.0, ((4, -1.0),)))
    engine = ScriptedEngine(
        [output("0-1", [5], "length"), output("0-0", [6], prompt_logprobs=entries)],
        [output("0-0", [6], "length")],
    )
    (result,) = generate(tokenizer, engine, ([1, 4], replace(PARAMS, n=2, prompt_logprobs=1)))
    assert [request.params.prompt_logprobs for request in engine.submitted] == [1, None]
    assert result.prompt_logprobs == list(entries)


def test_progress_counts_prompts_and_not_choices(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
):
    engine = FakeEngine(vocabulary_size=VOCABULARY_SIZE)
    several = replace(PARAMS, n=3)
    generate(tokenizer, engine, ("x", several), ("", PARAMS), ("y", several), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_no_prompts_give_no_results(tokenizer: Tokenizer):
    assert generate(tokenizer, FakeEngine(vocabulary_size=9)) == []
