"""Server options are checked once, by name."""

import dataclasses
from typing import Any

import pytest

from qwen35_jax.errors import ConfigError
from serve.config import ServeConfig


def test_defaults_are_fine_and_fixed():
    config = ServeConfig(served_model_name="m")
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("served_model_name", ""),
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("max_body_bytes", 0),
        ("keep_alive_seconds", 0),
        ("keep_alive_seconds", float("nan")),
        ("drain_seconds", -1),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any):
    with pytest.raises(ConfigError, match=field):
        ServeConfig(**{"served_model_name": "m", field: value})
