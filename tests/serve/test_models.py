"""GET /v1/models."""

from unittest.mock import ANY

import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import MAX_MODEL_LEN, error_of, request, run, serving

CARD = {
    "id": "tiny",
    "object": "model",
    "created": ANY,
    "owned_by": "qwen35-jax",
    "max_model_len": MAX_MODEL_LEN,
}


def test_the_list_holds_the_served_model(tokenizer: Tokenizer):
    response = request(tokenizer, "GET", "/v1/models")
    assert response.status_code == 200
    assert response.json() == {"object": "list", "data": [CARD]}


def test_one_model_is_shown_by_name(tokenizer: Tokenizer):
    assert request(tokenizer, "GET", "/v1/models/tiny").json() == CARD


@pytest.mark.parametrize("name", ["other", "tiny/other", "Tiny"])
def test_another_model_is_a_404(tokenizer: Tokenizer, name: str):
    response = request(tokenizer, "GET", f"/v1/models/{name}")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_creation_time_does_not_change(tokenizer: Tokenizer):
    async def exchange() -> set[int]:
        async with serving(tokenizer) as served:
            cards = [await served.http.get("/v1/models/tiny") for _ in range(2)]
            return {card.json()["created"] for card in cards}

    (created,) = run(exchange())
    assert isinstance(created, int)
