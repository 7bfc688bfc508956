"""Requests of every kind, and running them as users do: some now, some later, some given up."""

import random
from dataclasses import replace

import numpy as np

from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.request import Request
from qwen35_jax.model.paged import CachePools, PagedKV, StateSlots
from qwen35_jax.sampling_params import SamplingParams
from tests.support.engines import Outputs

# Of the tiny tokenizer, whose last ids are special.
VOCABULARY_SIZE = 320
LENGTHS = (1, 2, 3, 5, 17, 63, 64, 65, 127, 128, 129, 190)


def random_params(draw: random.Random, *, longest: int = 60) -> SamplingParams:
    """Options of every kind, always with a seed. longest: tokens to generate at most."""
    max_tokens = draw.choice([draw.randint(1, longest), longest])
    return SamplingParams(
        temperature=draw.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
        top_k=draw.choice([0, 0, 5, 200]),
        top_p=draw.choice([1.0, 1.0, 0.9]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        seed=draw.randrange(-(2**63), 2**63),
        max_tokens=max_tokens,
        min_tokens=draw.choice([0, 0, max_tokens // 2]),
        presence_penalty=draw.choice([0.0, 0.0, 0.7]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.4]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
        logit_bias=draw.choice([None, None, {3: 4.0, 9: -100.0}]),
        stop_token_ids=draw.choice([(), (), tuple(draw.sample(range(VOCABULARY_SIZE), 20))]),
        logprobs=draw.choice([None, None, 0, 3, 20]),
        prompt_logprobs=draw.choice([None, None, None, 2]),
        ignore_eos=draw.random() < 0.5,
    )


def random_prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(VOCABULARY_SIZE), k=length))


def random_request(name: str, draw: random.Random) -> Request:
    length = draw.choice([draw.choice(LENGTHS), draw.randint(1, LENGTHS[-1])])
    return Request(name, random_prompt(draw, length), random_params(draw))


def run_arriving(
    engine: ContinuousBatchingEngine,
    requests: list[Request],
    draw: random.Random,
    *,
    aborts: float = 0.0,
) -> Outputs:
    """Submit them between the steps, and before each step end one with a chance of `aborts`.

    The scheduler's books are checked after every step.
    """
    outputs: Outputs = {request.request_id: [] for request in requests}
    unfinished: list[str] = []
    waiting = list(reversed(requests))
    while waiting or engine.has_work():
        while waiting and draw.random() < 0.6:
            request = waiting.pop()
            engine.submit(request)
            unfinished.append(request.request_id)
        if unfinished and draw.random() < aborts:
            engine.abort(draw.choice(unfinished))
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                unfinished.remove(output.request_id)
        engine.scheduler.check_invariants()
    return outputs


def pools_of(engine: ContinuousBatchingEngine) -> tuple[int, int]:
    """Free pages and free slots."""
    return engine.scheduler.num_free_pages, engine.scheduler.num_free_slots


def preempt(engine: ContinuousBatchingEngine, name: str) -> None:
    """Take a sequence's pages away, as its turn would come when the pool runs dry."""
    before, engine._running = engine._running, None
    if before is not None:
        engine._take(engine.runner.collect(before))
    engine.scheduler._preempt(engine._live[name].sequence)


def fill_pools(
    engine: ContinuousBatchingEngine,
    value: float,
    *,
    slots: list[int] | slice = slice(None),
    pages: list[int] | slice = slice(None),
) -> None:
    """Write `value` over the state of slots and over pages, as a broken kernel could."""

    def fill(layer: PagedKV | StateSlots) -> PagedKV | StateSlots:
        where = _index(pages if isinstance(layer, PagedKV) else slots)
        return replace(
            layer, **{name: array.at[where].set(value) for name, array in vars(layer).items()}
        )

    state = engine.runner._state
    layers = tuple(fill(layer) for layer in state.pools.layers)
    engine.runner._state = replace(state, pools=CachePools(layers))


def _index(where: list[int] | slice) -> np.ndarray | slice:
    return where if isinstance(where, slice) else np.array(where, np.int32)
