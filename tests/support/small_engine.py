"""A continuous-batching engine on a model of two layers, and random requests to it."""

import random
from collections import defaultdict
from collections.abc import Collection

from qwen35_jax.engine.buckets import Buckets
from qwen35_jax.engine.core import ContinuousBatchingEngine
from qwen35_jax.engine.plan import CHUNK
from qwen35_jax.engine.request import Request
from qwen35_jax.engine.runner import Runner
from qwen35_jax.engine.scheduler import Scheduler
from qwen35_jax.model.transformer import Qwen35
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.step import Sizes
from tests.support.engines import Outputs
from tests.support.models import COMPILE_FAST

VOCABULARY, STOP = 78, 5
MAX_LEN, PAGE = 256, 16


def make_engine(
    params: Qwen35,
    *,
    few: bool = True,
    max_model_len: int = MAX_LEN,
    max_num_seqs: int = 7,
    pages: int = 120,
    max_num_batched_tokens: int = 317,
) -> ContinuousBatchingEngine:
    sizes = Sizes(
        num_pages=pages + 1, page_size=PAGE, num_slots=max_num_seqs + 1, max_model_len=max_model_len
    )
    max_chunks = max(1, max_num_batched_tokens // CHUNK)
    runner = Runner(
        params,
        VOCABULARY,
        sizes,
        Buckets.make(max_rows=max_num_seqs, max_chunks=max_chunks, few=few),
    )
    runner.compile(compiler_options=COMPILE_FAST)
    return ContinuousBatchingEngine(
        runner=runner,
        scheduler=Scheduler(
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            page_size=PAGE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_chunks=max_chunks,
        ),
        vocabulary_size=VOCABULARY,
        max_model_len=max_model_len,
        stop_token_ids=frozenset({STOP}),
    )


def run(
    engine: ContinuousBatchingEngine,
    requests: list[Request],
    *,
    arrivals: random.Random | None = None,
    aborted: Collection[str] = (),
) -> Outputs:
    """All outputs by request. arrivals: decides after which step each comes, and when those in
    `aborted` are; without it all come at once."""
    waiting = list(reversed(requests))
    outputs: Outputs = defaultdict(list)
    while waiting or engine.has_work():
        while waiting and (arrivals is None or arrivals.random() < 0.5):
            engine.submit(waiting.pop())
        if arrivals is not None and arrivals.random() < 0.3:
            running = sorted(name for name in engine._live if name in aborted)
            if running:
                engine.abort(arrivals.choice(running))
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
    return outputs


def random_request(name: str, seed: int) -> Request:
    stream = random.Random(seed)
    greedy = stream.random() < 0.4
    params = SamplingParams(
        temperature=0.0 if greedy else stream.choice([0.7, 1.0, 1.3]),
        top_k=stream.choice([0, 0, 5]),
        top_p=stream.choice([1.0, 0.9]),
        seed=stream.randrange(1000),
        max_tokens=stream.choice([stream.randint(1, 40), 60]),
        min_tokens=stream.choice([0, 0, 1]),
        presence_penalty=stream.choice([0.0, 0.0, 0.7]),
        frequency_penalty=stream.choice([0.0, 0.0, 0.4]),
        repetition_penalty=stream.choice([1.0, 1.0, 1.2]),
        logit_bias=stream.choice([None, None, {3: 4.0, 9: -100.0}]),
        logprobs=stream.choice([None, None, 3]),
        ignore_eos=stream.random() < 0.5,
    )
    length = stream.choice([1, 2, 5, 17, 63, 64, 65, 130, 190])
    prompt = tuple(stream.randrange(VOCABULARY) for _ in range(length))
    return Request(name, prompt, params)
