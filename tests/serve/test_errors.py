"""Whatever a client gets wrong has a status and the error object, and never a traceback."""

from typing import Any

import pytest

from qwen35_jax.tokenizer import Tokenizer
from serve.errors import MAX_MESSAGE_CHARACTERS, error_json
from tests.serve.harness import complete, error_of, request

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/", "/v1/completion", "/health/x"])
def test_an_unknown_path_is_a_404(tokenizer: Tokenizer, path: str):
    response = request(tokenizer, "GET", path)
    assert response.status_code == 404
    assert error_of(response) == {
        "message": f"there is nothing at {path}; there are /v1/completions, /v1/models, /health",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/tiny", "GET, HEAD"),
        ("PUT", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_a_405_that_says_which_are_right(
    tokenizer: Tokenizer, method: str, path: str, allowed: str
):
    response = request(tokenizer, method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    assert error_of(response)["message"] == f"{path} does not take {method}, only {allowed}"


def test_an_unknown_model_is_a_404(tokenizer: Tokenizer):
    response = complete(tokenizer, prompt="a", model="gpt-4")
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "model 'gpt-4' is not served here; this is 'tiny'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_a_bug_is_a_500_without_its_details(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    def broken(text: str) -> list[int]:
        raise RuntimeError("a secret")

    monkeypatch.setattr(tokenizer, "encode", broken)
    response = complete(tokenizer, prompt="a")
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in response.text


def test_long_messages_are_cut(tokenizer: Tokenizer):
    response = complete(tokenizer, prompt="a", model="m" * 100_000)
    assert response.status_code == 404
    assert len(error_of(response)["message"]) == MAX_MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (503, "server_error")]
)
def test_the_type_follows_from_the_status(status: int, kind: str):
    assert error_json(status, "m", param="p", code="c") == (
        b'{"error":{"message":"m","type":"' + kind.encode() + b'","param":"p","code":"c"}}'
    )


def test_extra_fields_beside_a_good_request_change_nothing_but_the_answer(tokenizer: Tokenizer):
    body: dict[str, Any] = {"prompt": "a", "temprature": 0}
    response = complete(tokenizer, **body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "temprature"
