"""What holds for every route, and what the server must not import."""

import subprocess
import sys

import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import complete, request


def test_the_request_id_comes_back(tokenizer: Tokenizer):
    for path in ("/health", "/nowhere"):
        response = request(tokenizer, "GET", path, headers={"x-request-id": "abc-123"})
        assert response.headers["x-request-id"] == "abc-123"


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "a\tb"])
def test_a_request_without_a_plain_id_gets_a_new_one(tokenizer: Tokenizer, sent: str | None):
    headers = {} if sent is None else {"x-request-id": sent}
    first, second = (
        request(tokenizer, "GET", "/health", headers=headers).headers["x-request-id"]
        for _ in range(2)
    )
    assert len(first) == 32
    assert first != second


def test_streams_carry_the_request_id_too(tokenizer: Tokenizer):
    assert "x-request-id" in complete(tokenizer, prompt="a", stream=True).headers


def test_one_request_id_may_be_used_twice_at_once(tokenizer: Tokenizer):
    response = complete(tokenizer, prompt=["a", "a"])
    assert len(response.json()["choices"]) == 2


@pytest.mark.parametrize("module", ["serve.app", "serve.__main__"])
def test_importing_the_server_imports_no_jax(module: str):
    program = (
        f"import sys, {module}; "
        "sys.exit(', '.join({'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
