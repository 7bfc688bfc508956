"""Bodies that are too large, of another type, or no JSON object."""

from collections.abc import AsyncIterator

import httpx
import pytest

from qwen35_jax.tokenizer import Tokenizer
from tests.serve.harness import error_of, request, run, serving


def post(
    tokenizer: Tokenizer,
    content: bytes,
    content_type: str | None = "application/json",
    **more_headers: str,
) -> httpx.Response:
    headers = {} if content_type is None else {"content-type": content_type}
    headers |= {name.replace("_", "-"): value for name, value in more_headers.items()}
    return request(tokenizer, "POST", "/v1/completions", content=content, headers=headers)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800 and more text after it"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"3",
        b"[]",
        b"null",
        b'"text"',
        b"true",
    ],
)
def test_what_is_no_json_object_is_a_400(tokenizer: Tokenizer, content: bytes):
    response = post(tokenizer, content)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")


@pytest.mark.parametrize("content", [b'{"prompt": "\\ud800"}', b'{"prompt": "\\uDBFFabc"}'])
def test_a_lone_surrogate_at_the_end_is_not_called_truncation(tokenizer: Tokenizer, content: bytes):
    message = error_of(post(tokenizer, content))["message"]
    assert message == "the body is not valid JSON: Invalid Unicode surrogate"


@pytest.mark.parametrize(
    "content", [b'{"prompt": "a', b'{"prompt": "\\ud83d', b'{"a": "\\ud83d\\ud']
)
def test_truncation_is_called_so(tokenizer: Tokenizer, content: bytes):
    assert "truncated" in error_of(post(tokenizer, content))["message"]


@pytest.mark.parametrize("depth", [3, 500, 700, 900, 950])
@pytest.mark.parametrize(("start", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("field", [b"prompt", b"logit_bias", b"stream_options", b"other"])
def test_deep_nesting_of_any_depth_is_a_400(
    tokenizer: Tokenizer, field: bytes, start: bytes, end: bytes, depth: int
):
    nested = start * depth + b"1" + end * depth
    response = post(tokenizer, b'{"' + field + b'": ' + nested + b"}")
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", None]
)
def test_another_content_type_is_a_415(tokenizer: Tokenizer, content_type: str | None):
    response = post(tokenizer, b'{"prompt": "a"}', content_type)
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        'application/json;CharSet="UTF-8"; x=y',
        "Application/JSON",
    ],
)
def test_json_has_several_spellings(tokenizer: Tokenizer, content_type: str):
    assert post(tokenizer, b'{"prompt": "a"}', content_type).status_code == 200


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", '"us-ascii"', ""])
def test_another_charset_is_a_415(tokenizer: Tokenizer, charset: str):
    response = post(tokenizer, b'{"prompt": "a"}', f"application/json; charset={charset}")
    assert response.status_code == 415
    charset = charset.strip('"')
    assert error_of(response)["message"].startswith(f"charset {charset!r} is not supported")


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 415), ("identity, br", 415), ("Identity", 200), ("", 200)]
)
def test_a_compressed_body_is_a_415_that_names_the_encoding(
    tokenizer: Tokenizer, encoding: str, status: int
):
    response = post(tokenizer, b'{"prompt": "a"}', content_encoding=encoding)
    assert response.status_code == status
    if status == 415:
        assert f"Content-Encoding '{encoding}'" in error_of(response)["message"]


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 413)])
def test_a_body_over_the_limit_is_a_413(
    tokenizer: Tokenizer, is_declared: bool, extra: int, status: int
):
    content = b'{"prompt": "a"}'.ljust(64) + b" " * extra

    async def chunks() -> AsyncIterator[bytes]:
        for place in range(0, len(content), 10):
            yield content[place : place + 10]

    async def exchange() -> httpx.Response:
        async with serving(tokenizer, max_body_bytes=64) as served:
            return await served.http.post(
                "/v1/completions",
                content=content if is_declared else chunks(),
                headers={"content-type": "application/json"},
            )

    response = run(exchange())
    assert response.status_code == status
    if status == 413:
        assert error_of(response)["message"] == "the body is larger than 64 bytes"
