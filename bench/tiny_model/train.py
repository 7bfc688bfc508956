"""Train the embedded model from scratch: data, training, evaluation, checkpoint.

    python -m bench.tiny_model.train --out DIR [--json FILE]

On a GPU this takes minutes, on a CPU days (--steps and --minutes make it shorter). bfloat16
compute, float32 master weights, AdamW. The checkpoint is in the published layout, with the
multi-token prediction layer.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.results_file import why_not_writable, write_results
from bench.tiny_model.dataset import (
    ROW_LENGTHS,
    Batch,
    batch_shapes,
    batches,
    load_conversations,
)
from bench.tiny_model.dataset import main as make_dataset
from bench.tiny_model.make_tokenizer import write_tokenizer
from qwen35_jax.checkpoint import fill_parameters, named_parameters
from qwen35_jax.checkpoint_writer import save_checkpoint
from qwen35_jax.config import ModelConfig
from qwen35_jax.model.cache import init_state
from qwen35_jax.model.mtp import predict_hidden
from qwen35_jax.model.transformer import Qwen35, hidden_states, parameter_count, unembed
from qwen35_jax.tokenizer import Tokenizer

Array = jax.Array

MTP_WEIGHT = 0.3
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
# Tuning Triton's tiles for every matrix product of an unrolled step takes minutes, and gains less.
GPU_COMPILER_OPTIONS: dict[str, str | bool | int | float] = {"xla_gpu_enable_triton_gemm": False}


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    """The real architecture and head sizes, a few million parameters."""
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    assert end_of_text is not None
    return ModelConfig(
        vocab_size=-(-tokenizer.vocabulary_size // 64) * 64,
        hidden_size=192,
        intermediate_size=512,
        layer_types=("linear_attention",) * 3
        + ("full_attention",)
        + ("linear_attention",) * 3
        + ("full_attention",),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        rotary_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_ids=(end_of_text,),
    )


def init_params(config: ModelConfig, seed: int) -> Qwen35:
    """float32 master weights: matrices N(0, 0.02), decays that reach from a token to thousands."""
    abstract = Qwen35(config, mtp=True)

    def make(key: Array, path: str, shape: tuple[int, ...]) -> Array:
        kind = path.rsplit(".", 1)[-1]
        if kind == "a_log":
            return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
        if kind == "dt_bias":
            step = jnp.exp(jax.random.uniform(key, shape, minval=np.log(1e-3), maxval=np.log(0.1)))
            return step + jnp.log(-jnp.expm1(-step))  # softplus of it is `step`
        if kind == "conv":
            return jax.random.uniform(key, shape, minval=-0.5, maxval=0.5)
        if len(shape) == 1:
            return jnp.ones(shape) if path.endswith("mixer.norm") else jnp.zeros(shape)
        scale = 0.02
        if kind in ("out", "down"):
            scale /= (2 * config.num_hidden_layers) ** 0.5
        return scale * jax.random.normal(key, shape)

    leaves = {
        path: make(jax.random.fold_in(jax.random.key(seed), index), path, leaf.shape)
        for index, (path, leaf) in enumerate(named_parameters(abstract))
    }
    return fill_parameters(abstract, leaves)


def in_model_dtype(params: Qwen35) -> Qwen35:
    """Master weights as the model keeps them: bfloat16, but for A_log and the gated norm."""
    abstract = Qwen35(params.config, mtp=True)
    return jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), params, abstract)


def loss(params: Qwen35, ids: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
    """ids: [B, T] int32, mask: [B, T] weights of the ids as labels -> mean loss in nats."""
    model = in_model_dtype(params)
    state = init_state(model.config, *ids.shape)
    hidden, _ = hidden_states(model, ids, state)
    main = _cross_entropy(unembed(model, hidden[:, :-1]), ids[:, 1:], mask[:, 1:])
    drafted, _ = predict_hidden(model, hidden[:, :-2], ids[:, 1:-1])
    draft = _cross_entropy(unembed(model, drafted), ids[:, 2:], mask[:, 2:])
    return main + MTP_WEIGHT * draft, {"loss": main, "mtp_loss": draft}


def _cross_entropy(logits: Array, labels: Array, weights: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW's direction, to be scaled by minus the learning rate; only matrices decay."""
    matrices = partial(jax.tree.map, lambda leaf: leaf.ndim == 2)
    return optax.chain(
        optax.clip_by_global_norm(GRADIENT_NORM),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=matrices),
    )


def learning_rate(peak: float, step: int, done: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth as `done` goes from 0 to 1."""
    cosine = 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return peak * cosine * min(1.0, step / WARMUP_STEPS)


def train(
    params: Qwen35,
    data: Iterator[Batch],
    *,
    steps: int,
    peak_learning_rate: float,
    deadline: float,
    tokens_per_batch: int,
) -> tuple[Qwen35, list[dict[str, float]]]:
    """Returns the weights and the loss curve, a row every hundred steps.

    Training ends after `steps` or at `deadline` (of time.perf_counter), whichever is first, and the
    learning rate falls to its end by then: equal seeds give equal weights where the steps decide.
    """
    optimizer = make_optimizer()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Qwen35, state: optax.OptState, ids: Array, mask: Array, rate: Array
    ) -> tuple[Any, ...]:
        (_, report), gradients = jax.value_and_grad(loss, has_aux=True)(params, ids, mask)
        updates, state = optimizer.update(gradients, state, params)  # pyright: ignore[reportArgumentType]
        params = jax.tree.map(lambda leaf, update: leaf - rate * update, params, updates)
        return params, state, report

    state = jax.jit(optimizer.init)(params)
    compiling = time.perf_counter()
    print("compiling a program for each row length; this may take minutes", flush=True)
    shapes = batch_shapes(tokens_per_batch)
    on_gpu = jax.default_backend() == "gpu"
    lowered = [
        step.lower(
            params,
            state,
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
        for shape in shapes
    ]
    with ThreadPoolExecutor() as threads:
        compiled = threads.map(
            lambda one: one.compile(GPU_COMPILER_OPTIONS if on_gpu else None), lowered
        )
        programs = dict(zip(shapes, compiled, strict=True))
    print(f"compiled in {time.perf_counter() - compiling:.0f} s", flush=True)

    curve: list[dict[str, float]] = []
    reports: list[dict[str, Array]] = []
    started = last = time.perf_counter()
    tokens = 0
    for number, batch in enumerate(data, start=1):
        done = max(number / steps, _share_of_time(started, deadline))
        rate = np.float32(learning_rate(peak_learning_rate, number, done))
        program = programs[batch.ids.shape]
        params, state, report = program(params, state, batch.ids, batch.mask, rate)
        reports.append(report)
        tokens += batch.ids.size
        if number % 100 and done < 1.0:
            continue
        mean = jax.tree.map(lambda *values: float(np.mean(values)), *jax.device_get(reports))
        now = time.perf_counter()
        row = {"step": number, **mean, "tokens_per_s": tokens / (now - last)}
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(
                f"the loss is {row['loss']} at step {number}: lower --learning-rate"
            )
        curve.append(row)
        print(json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)
        reports, tokens, last = [], 0, now
        if done >= 1.0:
            break
    return params, curve


def _share_of_time(started: float, deadline: float) -> float:
    """How much of the time has gone, from 0 to 1; compiling may have used it all."""
    now = time.perf_counter()
    return 1.0 if now >= deadline else (now - started) / (deadline - started)


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    deadline = time.perf_counter() + 60 * arguments.minutes
    problem = _problem(arguments)
    if problem is not None:
        print(f"bench.tiny_model.train: error: {problem}", file=sys.stderr)
        return 2

    write_tokenizer(arguments.out)
    with tempfile.TemporaryDirectory() as temporary:
        dataset = Path(temporary) / "conversations.npz"
        make_dataset(
            [
                *("--examples", str(arguments.examples), "--seed", str(arguments.seed)),
                *("--out", str(dataset), "--tokenizer", str(arguments.out)),
            ]
        )
        conversations = load_conversations(dataset)
    config = model_config(Tokenizer.from_directory(arguments.out))
    params = init_params(config, arguments.seed)
    print(f"{parameter_count(params):,} parameters on {jax.devices()[0].device_kind}", flush=True)
    data = batches(conversations, tokens_per_batch=arguments.tokens_per_batch, seed=arguments.seed)
    try:
        params, curve = train(
            params,
            data,
            steps=arguments.steps,
            peak_learning_rate=arguments.learning_rate,
            deadline=deadline,
            tokens_per_batch=arguments.tokens_per_batch,
        )
    except FloatingPointError as error:
        print(f"bench.tiny_model.train: error: {error}", file=sys.stderr)
        return 1
    save_checkpoint(in_model_dtype(params), arguments.out)
    if arguments.json:
        flags = ("examples", "steps", "minutes", "tokens_per_batch", "learning_rate", "seed")
        write_results(
            arguments.json,
            name="tiny_model_training",
            command="python -m bench.tiny_model.train --out DIR",
            model={"parameters": parameter_count(params), "hidden_size": config.hidden_size},
            flags={flag: getattr(arguments, flag) for flag in flags}
            | {"minutes": arguments.minutes if math.isfinite(arguments.minutes) else None},
            rows=curve,
            commit=arguments.commit,
        )
    print(f"Wrote {arguments.out}; try: qwen35 generate {arguments.out} --chat --prompt 'Hi!'")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.tiny_model.train", description="Train the embedded model from scratch."
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the new checkpoint"
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=700_000,
        help="conversations to make and learn from (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=4500, help="batches to learn from (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="end by then, with what was learnt, making data and compiling included",
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=int,
        default=32_768,
        help="size of a batch, the padding of its rows included (default: %(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=3e-3,
        help="at its highest, after the warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the data and the first weights (default: 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the loss curve there")
    parser.add_argument(
        "--commit", metavar="HASH", help="what the JSON calls the code (default: ask git)"
    )
    return parser


def _problem(arguments: argparse.Namespace) -> str | None:
    """What would fail after all the work, found before it; makes the directory."""
    for name, least in (
        ("examples", 1),
        ("steps", 1),
        ("tokens_per_batch", ROW_LENGTHS[-1]),
        ("seed", 0),
    ):
        if getattr(arguments, name) < least:
            flag = name.replace("_", "-")
            return f"--{flag} must be at least {least}, not {getattr(arguments, name)}"
    for name in ("minutes", "learning_rate"):
        if not getattr(arguments, name) > 0:
            return f"--{name.replace('_', '-')} must be over 0, not {getattr(arguments, name)}"
    problem = arguments.json and why_not_writable(arguments.json)
    if problem:
        return f"--json {problem}"
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if any(arguments.out.iterdir()):
            return f"--out {arguments.out} is not empty; name a new directory"
        with tempfile.TemporaryFile(dir=arguments.out):
            pass
    except OSError as error:
        return f"--out {arguments.out} can't be written: {error.strerror}"
    return None


if __name__ == "__main__":
    sys.exit(main())
