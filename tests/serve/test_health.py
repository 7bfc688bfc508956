"""GET /health follows the engine."""

import httpx

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import Served, TestEngine, error_of, request, run, serving


def health_after(
    tokenizer: Tokenizer, change: str, engine: TestEngine | None = None
) -> httpx.Response:
    async def exchange() -> httpx.Response:
        async with serving(tokenizer, engine) as served:
            await CHANGES[change](served)
            return await served.http.get("/health")

    return run(exchange())


async def use(served: Served) -> None:
    await served.http.post("/v1/completions", json={"prompt": "a"})


async def close(served: Served) -> None:
    served.thread.close()


async def drain(served: Served) -> None:
    served.client.drain()


CHANGES = {"use": use, "close": close, "drain": drain}


def test_a_running_engine_is_healthy(tokenizer: Tokenizer):
    response = request(tokenizer, "GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert health_after(tokenizer, "use").status_code == 200


def test_a_failed_engine_is_a_503_with_the_reason(tokenizer: Tokenizer):
    response = health_after(tokenizer, "use", TestEngine(fails_at_step=1))
    assert response.status_code == 503
    assert error_of(response) == {
        "message": "the engine failed: RuntimeError: the device is gone",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
    }


def test_a_closed_engine_and_a_draining_server_are_a_503(tokenizer: Tokenizer):
    closed, draining = (health_after(tokenizer, change) for change in ("close", "drain"))
    assert (closed.status_code, error_of(closed)["message"]) == (503, "the engine is closed")
    assert draining.status_code == 503
    assert error_of(draining)["message"] == "the server is shutting down"
