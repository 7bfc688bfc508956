"""The library: names, order, texts, per-item errors, streams, and what closing gives back."""

import gc
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine.runner import Runner
from qwen35_jax.engine.text_stream import TextDelta
from qwen35_jax.errors import ConfigError, InvalidRequestError
from qwen35_jax.llm import LLM, GenerationError
from qwen35_jax.loading import load_engine
from qwen35_jax.outputs import CompletionOutput, RequestOutput
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import (
    default_llm,
    default_reopened,
    fast_compilation,
    write_two_layer_checkpoint,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture(scope="module")
def llm() -> LLM:
    return default_llm()


@pytest.fixture
def quick_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLM() makes a fresh engine on the model that is loaded already."""
    default_llm()
    monkeypatch.setattr("qwen35_jax.llm.load_engine", default_reopened)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def completion(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> CompletionOutput:
    (result,) = generate(llm, prompt, params)
    assert result.error is None
    (output,) = result.outputs
    return output


def refusal(llm: LLM, prompt: Any) -> str:
    """The one error line of a prompt that is refused."""
    (result,) = generate(llm, [prompt])
    assert result.outputs == []
    assert result.error is not None and "\n" not in result.error
    return result.error


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits; only notices of what was ended may still be there."""
    outputs = llm.loaded.engine.step()
    assert all(output.finish_reason in ("abort", "error") for output in outputs)
    assert not llm.loaded.engine.has_work()


def test_results_have_vllms_names_and_the_prompts_order(llm: LLM):
    ids = llm.tokenizer.encode("Once upon")
    results = generate(llm, ["Hello", ids])
    assert [result.prompt for result in results] == ["Hello", None]
    assert [result.prompt_token_ids for result in results] == [llm.tokenizer.encode("Hello"), ids]
    assert results[0].request_id != results[1].request_id
    for result in results:
        (output,) = result.outputs
        assert (output.index, output.finish_reason, output.stop_reason) == (0, "length", None)
        assert (len(output.token_ids), output.logprobs) == (8, None)
    assert [field.name for field in fields(RequestOutput)] == [
        *("request_id", "prompt", "prompt_token_ids", "outputs", "error", "prompt_logprobs"),
    ]


def test_a_text_is_the_decoded_ids_without_a_cut_character(llm: LLM):
    for count in range(1, 9):
        output = completion(llm, "Hello", replace(GREEDY, max_tokens=count))
        decoded = llm.tokenizer.decode(output.token_ids)
        assert decoded.startswith(output.text)
        assert decoded[len(output.text) :] in ("", "\ufffd")


@pytest.mark.parametrize(
    "shape",
    [
        tuple,
        np.array,
        jnp.array,
        lambda ids: [np.int32(token_id) for token_id in ids],
        lambda ids: [ids],
        lambda ids: np.array([ids]),
        lambda ids: [np.array(ids)],
    ],
    ids=["tuple", "numpy", "jax", "numpy_ints", "list", "numpy_2d", "list_of_numpy"],
)
def test_token_ids_come_in_many_shapes(llm: LLM, shape: Any):
    ids = llm.tokenizer.encode("Hello")
    (result,) = generate(llm, shape(ids))
    assert result.prompt_token_ids == ids
    assert all(type(token_id) is int for token_id in result.prompt_token_ids)
    assert result.outputs == [completion(llm, "Hello")]


def test_no_prompts_give_no_results(llm: LLM):
    assert generate(llm, []) == []


@pytest.mark.usefixtures("quick_load")
def test_one_prompt_over_the_limit_among_a_hundred_is_one_error():
    prompts: list[Any] = [[token_id, 7] for token_id in range(100)]
    prompts[41] = [1] * 64
    with LLM(max_num_seqs=2, max_model_len=64) as llm:
        results = generate(llm, prompts, replace(GREEDY, max_tokens=1))
        assert_idle(llm)
        alone = completion(llm, prompts[5], replace(GREEDY, max_tokens=1))
    assert [result.prompt_token_ids for result in results] == prompts
    assert [number for number, result in enumerate(results) if result.error] == [41]
    assert results[41].outputs == []
    assert "64 tokens" in (results[41].error or "")
    good = [result.outputs[0] for result in results if not result.error]
    assert [len(output.token_ids) for output in good] == [1] * 99
    assert good[5] == alone


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"input_ids": [1], "attention_mask": [1]}, "attention masks and padding are not taken"),
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        (b"Hello", "not b'Hello'"),
        ([True, 1], "not [True, 1]"),
        ([1.0], "not [1.0]"),
        (np.array([1.5]), "not [1.5]"),
        (["a", 1], "not ['a', 1]"),
        (None, "not None"),
        ([-1], "token id -1"),
        ([10**30], f"token id {10**30}"),
        ("\ud800", "lone surrogate"),
    ],
    ids=str,
)
def test_prompts_that_cannot_run_are_refused_clearly(llm: LLM, prompt: Any, said: str):
    assert said in refusal(llm, prompt)
    with pytest.raises(InvalidRequestError):
        llm.stream(prompt)


@pytest.mark.parametrize("prompts", [b"Hello", None, 3, np.int64(3)], ids=str)
def test_what_is_no_prompt_and_no_list_of_them_is_refused(llm: LLM, prompts: Any):
    with pytest.raises(InvalidRequestError) as refused:
        generate(llm, prompts)
    assert refused.value.param == "prompts"


def test_a_mapping_names_what_it_holds(llm: LLM):
    (result,) = generate(llm, {"input_ids": [1], "attention_mask": [1]})
    assert "input_ids, attention_mask" in (result.error or "")


def test_each_prompt_may_have_its_own_params(llm: LLM):
    params = [replace(GREEDY, max_tokens=count) for count in (2, 5)]
    results = generate(llm, ["Hello", "Hello"], params)
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 5]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ([GREEDY], "1 entries for 2 prompts"),
        ([GREEDY] * 3, "3 entries for 2 prompts"),
        ({"temperature": 0}, "not {'temperature': 0}"),
        ([{"temperature": 0}] * 2, "must be a SamplingParams"),
    ],
    ids=["short", "long", "dict", "dicts"],
)
def test_wrong_sampling_params_are_refused_before_anything_runs(llm: LLM, params: Any, said: str):
    with pytest.raises(InvalidRequestError) as refused:
        generate(llm, ["Hello", "Hello"], params)
    assert said in str(refused.value)
    assert refused.value.param == "sampling_params"
    assert not llm.loaded.engine.has_work()


def test_a_stop_string_ends_the_text_before_it(llm: LLM):
    text = completion(llm, "Hello").text
    stop = text[len(text) // 2 :][:2]
    output = completion(llm, "Hello", replace(GREEDY, stop=[stop, "never said"]))
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 8
    assert_idle(llm)


def test_logprobs_are_one_entry_an_id(llm: LLM):
    output = completion(llm, "Hello", replace(GREEDY, max_tokens=1, logprobs=2))
    assert output.logprobs is not None
    (entry,) = output.logprobs
    assert entry.top[0] == (output.token_ids[0], entry.token)
    assert len(entry.top) == 2


def test_stream_deltas_concatenate_to_generates_result(llm: LLM):
    expected = completion(llm, "Hello")
    deltas = list(llm.stream("Hello", GREEDY))
    assert "".join(delta.text for delta in deltas) == expected.text
    assert list(itertools.chain(*(delta.token_ids for delta in deltas))) == expected.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["length"]


def test_a_stream_ends_before_a_stop_string(llm: LLM):
    text = completion(llm, "Hello").text
    stop = text[len(text) // 2 :][:2]
    deltas = list(llm.stream("Hello", replace(GREEDY, stop=stop)))
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert_idle(llm)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_streams_iterator_ends_its_request(llm: LLM, taken: int):
    stream = llm.stream("Hello", replace(GREEDY, max_tokens=100))
    assert len(list(itertools.islice(stream, taken))) == taken
    assert llm.loaded.engine.has_work()
    del stream
    assert_idle(llm)


def test_streams_and_generate_may_run_between_each_other(llm: LLM):
    first = llm.stream("Hello", GREEDY)
    second = llm.stream("Hello", replace(GREEDY, max_tokens=3))
    seen: list[list[TextDelta]] = [[next(first)], [next(second)]]
    between = completion(llm, "Hello")
    seen[0] += first
    seen[1] += second
    ids = [[i for delta in deltas for i in delta.token_ids] for deltas in seen]
    assert ids == [between.token_ids, between.token_ids[:3]]


def test_an_engine_failure_is_a_results_error_and_a_streams_exception(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "collect", fail)
        (result,) = generate(llm, "Hello")
        assert result.outputs == []
        assert result.error == "the device failed: RESOURCE_EXHAUSTED: no memory"
    stream = llm.stream("Hello", GREEDY)
    assert len(next(stream).token_ids) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "collect", fail)
        with pytest.raises(GenerationError, match="no memory"):
            next(stream)
    assert_idle(llm)
    assert len(completion(llm, "Hello").token_ids) == 8


def test_an_interrupt_while_running_leaves_the_llm_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    expected = completion(llm, "Hello")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "dispatch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["Hello", "Once upon"])
    assert_idle(llm)
    assert completion(llm, "Hello") == expected


def test_an_interrupt_while_submitting_leaves_nothing_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    encode = llm.tokenizer.encode

    def interrupted(text: str) -> list[int]:
        if text == "second":
            raise KeyboardInterrupt
        return encode(text)

    monkeypatch.setattr(llm.tokenizer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["first", "second"])
    assert_idle(llm)


def test_progress_goes_to_stderr_only_when_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]):
    generate(llm, "Hello")
    assert capsys.readouterr() == ("", "")
    llm.generate("Hello", GREEDY)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "1/1" in printed.err


def test_unknown_options_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"unknown option max_len, tp; there are model, .*seed"):
        LLM(max_len=3, tp=2)


@pytest.mark.usefixtures("quick_load")
def test_after_close_every_use_says_so():
    llm = LLM()
    stream = llm.stream("Hello", replace(GREEDY, max_tokens=100))
    next(stream)
    llm.close()
    llm.close()
    assert [delta.finish_reason for delta in stream] == ["abort"]
    for use in (
        lambda: llm.generate("Hello"),
        lambda: llm.stream("Hello"),
        lambda: llm.params,
        lambda: llm.tokenizer,
    ):
        with pytest.raises(ConfigError, match="this LLM is closed"):
            use()


@pytest.mark.usefixtures("quick_load")
def test_leaving_the_context_closes_it_also_after_an_error():
    with LLM(max_model_len=100) as llm:
        assert llm.loaded.max_model_len == 100
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("Hello")
    with pytest.raises(ZeroDivisionError), LLM() as llm:
        raise ZeroDivisionError
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("Hello")


@pytest.mark.usefixtures("quick_load")
def test_the_seed_decides_what_requests_without_one_get():
    params = SamplingParams(max_tokens=1)
    prompts = ["Hello"] * 2
    texts = []
    for seed in (5, 5, 6):
        with LLM(seed=seed) as llm:
            texts.append([result.outputs[0].token_ids for result in generate(llm, prompts, params)])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_five_cycles_of_open_and_close_leave_no_device_memory(tmp_path: Path):
    directory = write_two_layer_checkpoint(tmp_path)
    baseline = live_bytes()
    for cycle in range(5):
        with LLM(directory) as llm:
            # Compiling for each would take most of the time of this test.
            if cycle in (0, 4):
                assert completion(llm, [1, 2], replace(GREEDY, max_tokens=1)).token_ids
            assert live_bytes() > baseline
        assert live_bytes() == baseline


def test_what_a_door_must_know_of_the_model():
    loaded = default_llm().loaded
    assert loaded.model_name == "qwen3.5-tiny"
    assert loaded.max_model_len == 8192
    assert (loaded.directory / "config.json").is_file()
    assert "bfloat16" in loaded.description and "context 8192" in loaded.description


def test_dtype_numerics_and_load_format_reach_the_loader(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def load(directory: Path, config: ModelConfig, **options: Any) -> Any:
        seen.append((config.dtype, config.numerics, options))
        return default_llm().params

    monkeypatch.setattr("qwen35_jax.loading.load_or_make_params", load)
    load_engine(EngineConfig())
    load_engine(EngineConfig(dtype="float32", numerics="transformers", load_format="dummy", seed=3))
    assert seen == [
        ("bfloat16", "checkpoint", {"load_format": "auto", "seed": 0}),
        ("float32", "transformers", {"load_format": "dummy", "seed": 3}),
    ]


def test_a_context_over_the_checkpoints_is_refused(tmp_path: Path):
    directory = str(write_two_layer_checkpoint(tmp_path))
    with pytest.raises(ConfigError, match=r"max_model_len 8193 .*max_position_embeddings 8192"):
        load_engine(EngineConfig(model=directory, max_model_len=8193))


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(tmp_path: Path):
    directory = write_two_layer_checkpoint(tmp_path)
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 384', '"vocab_size": 128'))
    with pytest.raises(ConfigError, match=r"tokenizer has 320 ids.*vocab_size is 128"):
        load_engine(EngineConfig(model=str(directory), load_format="dummy"))


def test_weights_that_do_not_fit_are_a_config_error(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr("qwen35_jax.loading.load_or_make_params", fail)
    with pytest.raises(
        ConfigError, match=r"does not fit on cpu as planned: RES.* memory; lower --gpu-mem"
    ):
        load_engine(EngineConfig())


def test_threads_that_share_an_llm_get_their_own_results():
    llm = default_llm()
    prompts = [[index + 1] * 3 for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def whole(prompt: list[int]) -> list[int]:
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    def streamed(prompt: list[int]) -> list[int]:
        return [token_id for delta in llm.stream(prompt, params) for token_id in delta.token_ids]

    alone = [whole(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(whole, prompts))
        streams = list(threads.map(streamed, prompts))
    assert together == alone
    assert streams == alone
