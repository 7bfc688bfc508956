"""Checkpoints: load one onto the device, make random weights there, save a parameter tree.

Loading goes parameter by parameter in file order: a tensor's bytes go from the file's memory map to
the device, are transposed and joined there, and the host never holds a second copy.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from qwen35_jax.checkpoint_files import DTYPES, StoredTensor, open_checkpoint_files
from qwen35_jax.checkpoint_names import (
    HEAD,
    Form,
    TensorSlot,
    bare_name,
    skipped_group,
    tensor_slots,
)
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import CheckpointError
from qwen35_jax.model.transformer import Qwen35, parameter_bytes, parameter_count

logger = logging.getLogger(__name__)


def load_checkpoint(
    model: str | os.PathLike[str],
    *,
    config: ModelConfig | None = None,
    mtp: bool = False,
    progress: bool = True,
) -> Qwen35:
    """The parameters of a local checkpoint directory or hub id, on the default device.

    config: use this instead of the directory's config.json, for another dtype or numerics.
    mtp: load the multi-token prediction layer too, as `params.mtp`.
    progress: show a bar, where stderr is a terminal.

    Raises ConfigError for a model this engine doesn't implement, CheckpointError for damaged files
    and for tensors that are missing, doubled, unexpected or wrongly shaped, all in one message.
    """
    from qwen35_jax.hub import resolve_model

    directory = resolve_model(model)
    if config is None:
        config = ModelConfig.from_file(directory)
    started = time.perf_counter()
    slots = tensor_slots(config, mtp=mtp)
    tensors, skipped = match_tensors(directory, slots)
    total = sum(tensors[slot.name].array().nbytes for slot in slots)

    leaves: dict[str, jax.Array] = {}
    dtypes = {path: leaf.dtype for path, leaf in named_parameters(Qwen35(config, mtp=mtp))}
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=None if progress else True,
    ) as bar:
        for path, group in groupby(slots, key=lambda slot: slot.path):
            members = list(group)
            arrays = [tensors[slot.name].array() for slot in members]
            # A CPU device would otherwise keep the file's own pages as the weight.
            parts = [jax.device_put(array, may_alias=False) for array in arrays]
            forms = tuple(slot.form for slot in members)
            leaves[path] = _assemble(parts, forms=forms, dtype=dtypes[path])
            bar.update(sum(array.nbytes for array in arrays))
    params = fill_parameters(Qwen35(config, mtp=mtp), leaves)
    jax.block_until_ready(params)

    seconds = time.perf_counter() - started
    logger.info(
        "Loaded %s parameters, %s, from %s in %.1f s (%s/s)%s",
        f"{parameter_count(params):,}",
        human_bytes(total),
        directory,
        seconds,
        human_bytes(total / seconds),
        "".join(f"; skipped {count} {name} tensors" for name, count in sorted(skipped.items())),
    )
    return params


def match_tensors(
    directory: Path, slots: Sequence[TensorSlot]
) -> tuple[dict[str, StoredTensor], Counter[str]]:
    """Find each slot's tensor. Returns them by bare name, and how many were skipped by group.

    Raises CheckpointError with everything that is wrong, by stored name.
    """
    wanted = {slot.name: slot for slot in slots}
    found: dict[str, StoredTensor] = {}
    skipped: Counter[str] = Counter()
    problems: list[str] = []
    for file in open_checkpoint_files(directory):
        file.will_need_all()
        for tensor in file.tensors:
            name = bare_name(tensor.name)
            group = None if name in wanted else skipped_group(tensor.name)
            if group is None and name == HEAD and HEAD not in wanted:
                group = "tied head"
            if group is not None:
                skipped[group] += 1
            elif name is None or name not in wanted:
                problems.append(f"unexpected {tensor.name} in {file.path.name}")
            elif name in found:
                first = found[name]
                problems.append(
                    f"doubled {tensor.name} in {file.path.name} "
                    f"(also {first.name} in {first.file.path.name})"
                )
            else:
                found[name] = tensor
                problems += _mismatches(tensor, wanted[name])
    problems += [f"missing {name}" for name in wanted if name not in found]
    if problems:
        shown = problems[:20]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise CheckpointError(
            f"{directory}: {len(problems)} tensors don't fit its config.json: {'; '.join(shown)}"
        )
    return found, skipped


def _mismatches(tensor: StoredTensor, slot: TensorSlot) -> list[str]:
    problems = []
    if tensor.shape != slot.shape:
        problems.append(f"{tensor.name} is {list(tensor.shape)}, not {list(slot.shape)}")
    if tensor.dtype not in DTYPES:
        problems.append(f"{tensor.name} has dtype {tensor.dtype}, not one of {', '.join(DTYPES)}")
    return problems


@partial(jax.jit, static_argnames=("forms", "dtype"))
def _assemble(parts: list[jax.Array], *, forms: tuple[Form, ...], dtype: np.dtype) -> jax.Array:
    shaped = [
        part.T if form == "transposed" else part[:, 0] if form == "squeezed" else part
        for part, form in zip(parts, forms, strict=True)
    ]
    joined = shaped[0] if len(shaped) == 1 else jnp.concatenate(shaped, axis=-1)
    return joined.astype(dtype)


def named_parameters(params: nnx.Module) -> list[tuple[str, jax.Array]]:
    """Each parameter with its path, such as ("layers.0.mlp.gate_up", array)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    # The last key is the one inside nnx.Param.
    return [(".".join(_key_name(key) for key in keys[:-1]), leaf) for keys, leaf in flat]


def _key_name(key: Any) -> str:
    return str(key.idx) if isinstance(key, jax.tree_util.SequenceKey) else str(key).lstrip(".")


def fill_parameters(abstract: Qwen35, leaves: dict[str, jax.Array]) -> Qwen35:
    """The module with `leaves`, by path, in place of its shapes."""
    paths = [path for path, _ in named_parameters(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[path] for path in paths])


def random_params(config: ModelConfig, seed: int = 0) -> Qwen35:
    """Random weights made on the device: matrices N(0, 0.02), decays as the model is initialised.

    Every one-dimensional parameter is random too, so that a wrong use of it shows.
    """

    def make(index: int, path: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.fold_in(_random_key(seed), index)
        kind = path.rsplit(".", 1)[-1]
        return _random_leaf(key, kind=kind, shape=leaf.shape, dtype=np.dtype(leaf.dtype))

    abstract = Qwen35(config)
    named = enumerate(named_parameters(abstract))
    return fill_parameters(abstract, {path: make(i, path, leaf) for i, (path, leaf) in named})


def _random_key(seed: int) -> jax.Array:
    """From all 64 bits: jax.random.key takes 32 where 64-bit integers are off."""
    words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


@partial(jax.jit, static_argnames=("kind", "shape", "dtype"))
def _random_leaf(
    key: jax.Array, *, kind: str, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    if kind == "a_log":
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)).astype(dtype)
    # Drawn in the parameter's dtype: a float32 draw of the embedding alone is 2.5 GB.
    normal = jax.random.normal(key, shape, dtype)
    if kind == "norm" and dtype == np.float32:
        return 1.0 + 0.1 * normal
    scale = 0.3 if kind == "conv" else 0.02 if len(shape) == 2 else 0.1
    return normal * jnp.asarray(scale, dtype)


def load_or_make_params(
    model: str | os.PathLike[str], config: ModelConfig, *, load_format: str, seed: int
) -> Qwen35:
    """What EngineConfig.load_format asks for: the checkpoint's weights, or random ones."""
    if load_format == "auto":
        return load_checkpoint(model, config=config)
    params = random_params(config, seed)
    jax.block_until_ready(params)
    logger.info("Made %s of random weights on the device", human_bytes(parameter_bytes(params)))
    return params


def human_bytes(count: float) -> str:
    """Such as "8.41 GB" or "1.7 MB": decimal units, as link and memory speeds are given."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
