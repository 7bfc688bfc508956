"""Several choices of a prompt, log-probabilities of the prompt itself, and streams of asyncio."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from qwen35_jax.errors import ConfigError, InvalidRequestError
from qwen35_jax.llm import LLM
from qwen35_jax.outputs import RequestOutput
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import default_llm, default_reopened, fast_compilation

SAMPLED = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture(scope="module")
def llm() -> LLM:
    return default_llm()


def generate(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    assert result.error is None
    return result


def test_four_choices_of_one_seed_differ_and_repeat(llm: LLM):
    first, again = (generate(llm, "Once upon a time", SAMPLED) for _ in range(2))
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 4
    assert [choice.finish_reason for choice in first.outputs] == ["length"] * 4
    assert first.outputs == again.outputs


def test_a_choice_does_not_hang_on_how_many_there_are(llm: LLM):
    four = generate(llm, "Once upon a time", SAMPLED).outputs
    two = generate(llm, "Once upon a time", replace(SAMPLED, n=2)).outputs
    assert two == four[:2]
    alone = generate(llm, "Once upon a time", SAMPLED.of_choice(3)).outputs[0]
    assert alone.token_ids == four[3].token_ids


def test_the_highest_seed_has_choices_too():
    highest = SamplingParams(seed=2**63 - 1, n=2)
    assert highest.of_choice(1).seed == -(2**63)
    assert SamplingParams(n=2, prompt_logprobs=1).of_choice(1).prompt_logprobs is None
    assert SamplingParams(seed=3).of_choice(0) == SamplingParams(seed=3)


def test_a_choice_that_stops_leaves_the_others_running(llm: LLM):
    texts = [choice.text for choice in generate(llm, "Once upon a time", SAMPLED).outputs]
    stop = texts[0][:10]
    assert not any(stop in text for text in texts[1:])
    stopped, *others = generate(llm, "Once upon a time", replace(SAMPLED, stop=stop)).outputs
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", stop)
    assert [choice.text for choice in others] == texts[1:]


def test_prompt_logprobs_are_an_entry_a_token_but_the_first(llm: LLM):
    result = generate(llm, "Once upon a time", replace(GREEDY, prompt_logprobs=2, n=1))
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None and len(others) == len(result.prompt_token_ids) - 1
    assert all(one is not None and len(one.top) == 2 for one in others)
    assert generate(llm, "Once upon a time", GREEDY).prompt_logprobs is None


def test_a_prompts_logprobs_are_those_of_generating_it(llm: LLM):
    """What the model says after a prompt is what it says inside a longer one."""
    said = generate(llm, "Hello", replace(GREEDY, logprobs=1))
    ids = [*said.prompt_token_ids, *said.outputs[0].token_ids]
    (whole,) = llm.generate([ids], replace(GREEDY, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert whole.prompt_logprobs is not None and said.outputs[0].logprobs is not None
    inside = whole.prompt_logprobs[len(said.prompt_token_ids) :]
    for one, other in zip(inside, said.outputs[0].logprobs, strict=True):
        # bf16: measured 0.03.
        assert one is not None and one.token == pytest.approx(other.token, abs=0.1)


@pytest.mark.parametrize("field", ["n", "prompt_logprobs"])
def test_streams_refuse_what_has_no_place_in_them(llm: LLM, field: str):
    params = replace(GREEDY, temperature=1.0, **{field: 2})
    with pytest.raises(InvalidRequestError, match=f"takes no {field}") as refused:
        llm.stream("Hello", params)
    assert refused.value.param == field


def test_async_streams_run_together_and_say_what_generate_says(llm: LLM):
    prompts = [f"Number {number}" for number in range(6)]

    async def one(prompt: str) -> str:
        return "".join([delta.text async for delta in llm.astream(prompt, GREEDY)])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(one, prompts))

    before = llm.stats()
    texts = asyncio.run(all_of_them())
    after = llm.stats()
    assert texts == [generate(llm, prompt, GREEDY).outputs[0].text for prompt in prompts]
    assert after.finished["length"] - before.finished.get("length", 0) == 6
    assert after.steps - before.steps < 6 * 8
    assert after.compiles_after_ready == 0


def test_leaving_an_async_stream_ends_its_request(llm: LLM):
    async def some() -> None:
        stream = llm.astream("Hello", replace(GREEDY, max_tokens=1000))
        async for _ in stream:
            break
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    aborted = llm.stats().finished.get("abort", 0)
    asyncio.run(some())
    assert llm.stats().running <= 1
    generate(llm, "Hello", GREEDY)
    assert llm.stats().finished["abort"] == aborted + 1
    assert llm.stats().running == 0


def test_closing_while_threads_generate_ends_them_as_aborted_or_says_that_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("qwen35_jax.llm.load_engine", default_reopened)
    long = replace(GREEDY, max_tokens=500)

    def work(llm: LLM, seen: list[str]) -> None:
        try:
            while True:
                seen += [
                    output.finish_reason
                    for result in llm.generate(["Hello"] * 2, long, use_tqdm=False)
                    for output in result.outputs
                ]
        except ConfigError as error:
            assert "this LLM is closed" in str(error)
            seen.append("closed")

    default_llm()
    for seconds in (0.0, 0.05, 0.2):
        llm = LLM(max_num_seqs=3)
        seen: list[list[str]] = [[] for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            ends = [threads.submit(work, llm, one) for one in seen]
            time.sleep(seconds)
            llm.close()
            for end in ends:
                end.result(60)
        assert all(one[-1] == "closed" for one in seen)
        assert {reason for one in seen for reason in one} <= {"length", "abort", "closed"}
