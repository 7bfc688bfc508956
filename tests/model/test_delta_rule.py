"""The delta rule against a float64 loop: both forms, hard keys, strong decay, padding."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.model.delta_rule import (
    CHUNK,
    RECURRENT_TOKENS,
    chunked_delta_rule,
    delta_rule,
    recurrent_delta_rule,
    unit_lower_inverse,
)
from tests.support.models import COMPILE_FAST

Keys = Literal["random", "alike", "same"]
Inputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 16, 24
LENGTHS = (1, 2, 9, 63, 64, 65, 128, 130)
FORMS = {"recurrent": recurrent_delta_rule, "chunked": chunked_delta_rule}
# Measured, relative to the largest value of the loop's: 1.3e-6 with keys of every kind.
TOLERANCE = 1e-5

jitted = {name: jax.jit(form, compiler_options=COMPILE_FAST) for name, form in FORMS.items()}


def make_inputs(
    length: int, *, keys: Keys = "random", strongest_decay: float = 3.0, seed: int = 0
) -> Inputs:
    """q, k, v, g, beta and a state that isn't zero, as the model makes them; all float32."""
    stream = np.random.default_rng([length, seed])
    q, k = stream.standard_normal((2, BATCH, length, HEADS, KEY_DIM))
    if keys != "random":
        spread = 0.05 if keys == "alike" else 0.0
        k = stream.standard_normal((BATCH, 1, HEADS, KEY_DIM)) + spread * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = stream.standard_normal((BATCH, length, HEADS, VALUE_DIM))
    # From next to no decay to the strongest within one sequence.
    g = -strongest_decay * stream.uniform(0, 1, (BATCH, length, HEADS)) ** 6
    beta = stream.uniform(0, 1, (BATCH, length, HEADS))
    state = stream.standard_normal((BATCH, HEADS, KEY_DIM, VALUE_DIM))
    q, k, v, g, beta, state = (x.astype(np.float32) for x in (q, k, v, g, beta, state))
    return q, k, v, g, beta, state


def loop(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64, one token, row and head at a time."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in inputs)
    out = np.zeros(v.shape)
    for row, token, head in np.ndindex(*g.shape):
        s = state[row, head] * np.exp(g[row, token, head])
        key = k[row, token, head]
        s = s + np.outer(key, beta[row, token, head] * (v[row, token, head] - s.T @ key))
        out[row, token, head] = s.T @ q[row, token, head]
        state[row, head] = s
    return out, state


def largest_error(actual: jax.Array, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("keys", ["random", "alike", "same"])
@pytest.mark.parametrize("form", FORMS)
def test_form_equals_float64_loop_at_every_length(form: str, keys: Keys) -> None:
    for length in LENGTHS:
        inputs = make_inputs(length, keys=keys)
        expected_out, expected_state = loop(*inputs)
        out, state = jitted[form](*inputs)
        assert out.shape == expected_out.shape
        assert largest_error(out, expected_out) <= TOLERANCE, length
        assert largest_error(state, expected_state) <= TOLERANCE, length


@pytest.mark.parametrize("form", FORMS)
def test_decay_of_ninety_underflows_without_harm(form: str) -> None:
    inputs = make_inputs(130, strongest_decay=90.0)
    assert inputs[3].min() < -85
    expected_out, expected_state = loop(*inputs)
    out, state = jitted[form](*inputs)
    # The chunked form takes differences of running sums near -800, which float32 holds to 6e-5.
    # Measured: 2e-5.
    assert largest_error(out, expected_out) <= 1e-4
    assert largest_error(state, expected_state) <= 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_gradients_stay_finite_under_strong_decay_and_equal_keys(form: str) -> None:
    inputs = make_inputs(65, keys="same", strongest_decay=90.0)
    gradients = jax.grad(lambda inputs: sum(jnp.sum(jnp.sin(x)) for x in FORMS[form](*inputs)))(
        inputs
    )
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 63, 64, 65])
def test_carried_state_equals_one_run(form: str, cut: int) -> None:
    *inputs, state = make_inputs(130, keys="alike")
    whole_out, whole_state = jitted["recurrent"](*inputs, state)
    first_out, state = jitted[form](*(x[:, :cut] for x in inputs), state)
    second_out, state = jitted[form](*(x[:, cut:] for x in inputs), state)
    out = jnp.concatenate([first_out, second_out], axis=1)
    assert largest_error(out, np.asarray(whole_out)) <= TOLERANCE
    assert largest_error(state, np.asarray(whole_state)) <= TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_padding_tokens_leave_the_state(form: str) -> None:
    q, k, v, g, beta, state = make_inputs(70)
    padding = np.arange(70) >= 40
    g, beta = (np.where(padding[:, None], 0.0, x) for x in (g, beta))
    _, padded_state = jitted[form](q, k, v, g, beta, state)
    _, expected = loop(*(x[:, :40] for x in (q, k, v, g, beta)), state)
    assert largest_error(padded_state, expected) <= TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_only_padding_returns_the_state_bit_for_bit(form: str) -> None:
    q, k, v, g, beta, state = make_inputs(64)
    _, after = jitted[form](q, k, v, np.zeros_like(g), np.zeros_like(beta), state)
    np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize("length", [1, RECURRENT_TOKENS, RECURRENT_TOKENS + 1])
def test_form_is_chosen_by_length(length: int) -> None:
    inputs = make_inputs(length)
    form = recurrent_delta_rule if length <= RECURRENT_TOKENS else chunked_delta_rule
    assert str(jax.make_jaxpr(delta_rule)(*inputs)) == str(jax.make_jaxpr(form)(*inputs))


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_unit_lower_inverse_equals_numpy(scale: float) -> None:
    stream = np.random.default_rng(0)
    lower = np.tril(stream.uniform(-scale, scale, (2, 3, CHUNK, CHUNK)) / 8, k=-1)
    lower = lower.astype(np.float32)
    identity = np.eye(CHUNK)
    expected = np.linalg.solve(
        identity + lower.astype(np.float64), np.broadcast_to(identity, lower.shape)
    )
    assert largest_error(unit_lower_inverse(jnp.asarray(lower)), expected) <= 1e-5


def test_unit_lower_inverse_of_equal_keys_does_not_overflow() -> None:
    # The powers of this matrix reach 1e18, while its inverse holds only 1, -1 and 0.
    lower = np.tril(np.ones((CHUNK, CHUNK), np.float32), k=-1)
    inverse = unit_lower_inverse(jnp.asarray(lower))
    np.testing.assert_array_equal(inverse, np.eye(CHUNK) - np.eye(CHUNK, k=-1))
