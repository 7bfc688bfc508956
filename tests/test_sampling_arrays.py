"""From SamplingParams to the device's rows."""

from typing import Any

import jax
import numpy as np
import pytest

from qwen35_jax.errors import InvalidRequestError
from qwen35_jax.sampling_arrays import MAX_STOP_IDS, NO_ID, SamplingArrays, options_of
from qwen35_jax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams


def made(*, seed: int = 0, stop_ids: tuple[int, ...] = (), **params: Any) -> SamplingArrays:
    return options_of(SamplingParams(**params), seed=seed, stop_ids=stop_ids)


def test_every_option_is_in_its_place():
    options = made(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, presence_penalty=-1.5,
        frequency_penalty=0.75, repetition_penalty=1.25, min_tokens=7, logprobs=4,
        logit_bias={9: 1.5, 2: -100}, seed=(5 << 32) + 6, stop_ids=(8, 3),
    )  # fmt: skip
    found = [options.temperature, options.top_k, options.top_p, options.min_p, options.presence,
             options.frequency, options.repetition, options.min_tokens, options.logprobs,
             options.step]  # fmt: skip
    assert found == [0.5, 3, 0.25, 0.125, -1.5, 0.75, 1.25, 7, 4, 0]
    assert list(options.seed) == [5, 6]
    assert list(options.bias_ids[:3]) == [2, 9, NO_ID]
    assert list(options.bias_values[:3]) == [-100, 1.5, 0]
    assert list(options.stop_ids[:3]) == [3, 8, NO_ID]


def test_all_rows_have_the_same_shapes_and_types():
    fullest = made(
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1),
        stop_ids=tuple(range(MAX_STOP_IDS)),
        temperature=1,
        repetition_penalty=2,
    )
    for one, other in zip(jax.tree.leaves(fullest), jax.tree.leaves(made()), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    two = SamplingArrays.greedy(2)
    for one, rows in zip(jax.tree.leaves(made()), jax.tree.leaves(two), strict=True):
        assert (rows.shape, rows.dtype) == ((2, *one.shape), one.dtype)
    assert not np.asarray(two.temperature).any()


def test_negative_seeds_are_those_of_two_to_the_64():
    assert list(made(seed=-1).seed) == list(made(seed=2**64 - 1).seed) == [2**32 - 1] * 2


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e-320, 1e-42, 1e300])
def test_numbers_beyond_float32_become_its_smallest_and_largest(name: str, value: float):
    params: dict[str, Any] = {name: value}
    options = made(**params)
    found = options.temperature if name == "temperature" else options.repetition
    limits = np.finfo(np.float32)
    assert found == (limits.tiny if value < 1 else limits.max)


def test_a_tiny_negative_penalty_keeps_its_sign():
    assert made(presence_penalty=-1e-320).presence == -np.finfo(np.float32).tiny


def test_more_stop_ids_than_there_is_room_for_are_refused():
    assert made(stop_ids=tuple(range(MAX_STOP_TOKEN_IDS))).stop_ids[-1] == NO_ID
    with pytest.raises(InvalidRequestError, match="stop ids are 1057; at most 1056") as refused:
        made(stop_ids=tuple(range(MAX_STOP_IDS + 1)))
    assert refused.value.param == "stop_token_ids"
