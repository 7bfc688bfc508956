"""`qwen35 verify`: the gate lets equal logits pass and catches the mistakes that engines make."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax import verify
from qwen35_jax.checkpoint import load_checkpoint
from qwen35_jax.checkpoint_names import tensor_slots
from qwen35_jax.cli import main as cli_main
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.model.transformer import Qwen35, forward
from qwen35_jax.verify import Comparison, compare, main
from qwen35_jax.verify_reference import TOP
from tests.support.engines import (
    fast_compilation,
    log_softmax,
    two_layer_config,
    two_layer_params,
    write_two_layer_checkpoint,
)
from tests.support.models import COMPILE_FAST, filled
from tests.support.tiny_models import tiny_weights

Weights = dict[str, np.ndarray]
Reference = dict[str, np.ndarray]

# Longer than what is compared of it, and long enough for a wrong RoPE base to show.
PROMPT_TOKENS, STEPS = 192, 4
PROMPT = np.arange(PROMPT_TOKENS) * 7 % 79


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation() -> Iterator[None]:
    with fast_compilation():
        yield


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "log_to_terminal", lambda: None)


def reference_of(params: Qwen35, name: str, prompt: np.ndarray, steps: int) -> Reference:
    """What verify_reference.py writes for one prompt, from this engine's whole forward pass.

    The tokens after the prompt are arbitrary: the engine is fed them whatever it would choose.
    """
    tokens = np.arange(5, 5 + steps, dtype=np.int32)
    ids = jnp.asarray(np.concatenate([prompt, tokens]))[None]
    logits = jax.jit(forward, compiler_options=COMPILE_FAST)(params, ids)[0]
    logprobs = log_softmax(np.asarray(logits))
    top = np.argsort(-logprobs, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
    kept = np.take_along_axis(logprobs, top, -1).astype(np.float32)
    prompt_end = slice(max(0, len(prompt) - verify.PROMPT_POSITIONS), len(prompt))
    greedy = slice(len(prompt), None)
    return {
        f"{name}.tokens": tokens,
        f"{name}.prompt.ids": top[prompt_end],
        f"{name}.prompt.logprobs": kept[prompt_end],
        f"{name}.greedy.ids": top[greedy],
        f"{name}.greedy.logprobs": kept[greedy],
    }


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(two_layer_params(), "long", PROMPT, STEPS)


def test_the_same_model_passes_with_next_to_no_difference(reference: Reference):
    prompt, greedy = compare(two_layer_params(), "long", PROMPT, reference)
    assert (prompt.stage, prompt.prompt_tokens, prompt.positions) == ("prompt", 192, 64)
    assert (greedy.stage, greedy.prompt_tokens, greedy.positions) == ("greedy", 192, STEPS)
    for one in (prompt, greedy):
        assert one.passed
        assert one.same_tokens == one.positions
        assert one.regret == 0.0
        assert one.p99 < 1e-4


def altered(change: Callable[[Weights], None], **config_changes: Any) -> Qwen35:
    fields = two_layer_config()
    weights = tiny_weights(fields)
    change(weights)
    config = ModelConfig.from_dict(fields).replace(dtype="float32", **config_changes)
    return filled(Qwen35(config), tensor_slots(config), weights)


def _swap_two_value_heads_gates(weights: Weights) -> None:
    z = weights["layers.0.linear_attn.in_proj_z.weight"]
    width = len(z) // 4
    weights["layers.0.linear_attn.in_proj_z.weight"] = np.concatenate(
        [z[width : 2 * width], z[:width], z[2 * width :]]
    )


def _reverse_the_convolutions_taps(weights: Weights) -> None:
    name = "layers.0.linear_attn.conv1d.weight"
    weights[name] = weights[name][..., ::-1].copy()


def _shift_the_decay(weights: Weights) -> None:
    weights["layers.0.linear_attn.A_log"] += 1.0


def _drop_a_norms_offset(weights: Weights) -> None:
    weights["layers.1.input_layernorm.weight"] *= 0.0


MISTAKES: dict[str, Callable[[], Qwen35]] = {
    "rope_base": partial(altered, lambda weights: None, rope_theta=1e6),
    "norm_offset": partial(altered, _drop_a_norms_offset),
    "value_heads": partial(altered, _swap_two_value_heads_gates),
    "conv_taps": partial(altered, _reverse_the_convolutions_taps),
    "decay": partial(altered, _shift_the_decay),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, reference: Reference):
    comparisons = compare(MISTAKES[mistake](), "long", PROMPT, reference)
    assert not all(one.passed for one in comparisons), comparisons


EQUAL = Comparison(
    prompt_tokens=1, stage="prompt", positions=1, same_tokens=1, regret=0.0, mean=0.0, p99=0.0
)


@pytest.mark.parametrize(
    ("figure", "limit"),
    [("regret", verify.MAX_REGRET), ("mean", verify.MAX_MEAN), ("p99", verify.MAX_P99)],
)
def test_each_figure_has_its_own_limit(figure: str, limit: float):
    assert replace(EQUAL, **{figure: limit}).passed
    assert not replace(EQUAL, **{figure: limit * 1.01}).passed
    assert not replace(EQUAL, **{figure: np.nan}).passed


def test_regret_of_a_token_outside_the_references_is_that_of_the_last_of_them():
    reference = {
        "x.ids": np.array([[3, 4], [3, 4], [3, 4]]),
        "x.logprobs": np.array([[-0.1, -3.0]] * 3, np.float32),
    }
    picked = (np.array([3, 4, 9]), reference["x.logprobs"])
    comparison = verify._compare(1, "prompt", picked, reference, "x")
    assert (comparison.same_tokens, comparison.positions) == (1, 3)
    assert comparison.regret == pytest.approx(2.9)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_two_layer_checkpoint(tmp_path / "model")


@pytest.fixture
def with_reference(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """transformers' part, done by this engine in float32. Returns what to add to its logprobs."""
    off = {"by": 0.0}

    def run(
        python: str, directory: Path, prompts: Any, *, dtype: str, device: str, steps: int
    ) -> Reference:
        config = ModelConfig.from_file(directory).replace(dtype=dtype)
        params = load_checkpoint(directory, config=config, progress=False)
        results: Reference = {"versions": np.array(["transformers 0", "torch 0", device])}
        for name, prompt in prompts.items():
            results |= reference_of(params, name, prompt, steps)
            results[f"{name}.greedy.logprobs"] = results[f"{name}.greedy.logprobs"] + off["by"]
        return results

    monkeypatch.setattr(verify, "_require_reference", lambda python: None)
    monkeypatch.setattr(verify, "_run_reference", run)
    return off


FLAGS = ["--prompt-lengths", "5", "--steps", "3", "--dtype", "float32"]


def test_an_equal_model_exits_with_0(
    checkpoint: Path, with_reference: dict[str, float], capsys: pytest.CaptureFixture[str]
):
    assert main([str(checkpoint), *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Reference: transformers 0, torch 0, auto"
    assert lines[1].split() == ["prompt", "stage", "same", "regret", "mean", "p99"]
    assert lines[2].split() == ["5", "prompt", "5/5", "0.0000", "0.0000", "0.0000"]
    assert lines[3].split() == ["5", "greedy", "3/3", "0.0000", "0.0000", "0.0000"]
    assert lines[4:] == ["PASS"]


def test_another_model_exits_with_1_and_the_figures_are_written(
    checkpoint: Path,
    with_reference: dict[str, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    with_reference["by"] = 0.5
    path = tmp_path / "figures.json"
    assert main([str(checkpoint), *FLAGS, "--json", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].endswith("over the limit")
    assert lines[-1].startswith("FAIL")
    content = json.loads(path.read_text())
    assert list(content) == ["passed", "reference", "rows"]
    assert (content["passed"], content["reference"][0]) == (False, "transformers 0")
    assert [row["passed"] for row in content["rows"]] == [True, False]
    assert content["rows"][1]["mean"] == pytest.approx(0.5, abs=1e-3)


def test_without_transformers_it_is_one_line_and_exit_code_2(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli_main(["verify", str(checkpoint)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("qwen35 verify: error: verify needs torch and transformers")
    assert "(ModuleNotFoundError: No module named" in line and "--reference-python" in line


def test_an_interpreter_that_is_none_is_one_line_and_exit_code_2(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["verify", str(checkpoint), "--reference-python", "./no/python"]
    assert cli_main(argv) == 2
    expected = "qwen35 verify: error: --reference-python ./no/python: No such file or directory\n"
    assert capsys.readouterr() == ("", expected)


def test_a_reference_that_fails_says_its_last_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'Traceback\\nRuntimeError: no memory\\n' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(verify, "_require_reference", lambda python: None)
    with pytest.raises(ConfigError, match=r"could not run .*: RuntimeError: no memory$"):
        main([str(checkpoint), *FLAGS, "--reference-python", str(python)])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-lengths", ""], "different positive integers, not ''"),
        (["--prompt-lengths", "5,x"], "not '5,x'"),
        (["--prompt-lengths", "5,,7"], "not '5,,7'"),
        (["--prompt-lengths", "0"], "not '0'"),
        (["--prompt-lengths", "5,-1"], "not '5,-1'"),
        (["--prompt-lengths", "5,5"], "not '5,5'"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--load-format", "dummy"], "use auto"),
        (["--json", "no/such/directory/x.json"], "--json no/such/directory/x.json"),
        (["--prompt-lengths", "8192", "--steps", "1"], "don't fit the context of 8192"),
        (["--max-model-len", "10", "--prompt-lengths", "8"], "don't fit the context of 10"),
    ],
    ids=str,
)
def test_bad_flags_are_refused_before_anything_runs(
    flags: list[str], said: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(verify, "_require_reference", lambda python: None)
    monkeypatch.setattr(verify, "_run_reference", never)
    with pytest.raises(ConfigError) as refused:
        main([str(checkpoint), *flags])
    assert said in str(refused.value)
