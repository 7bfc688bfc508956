"""A request body as a JSON object, within its size limit."""

from typing import Any

import msgspec
from starlette.requests import Request

from qwen35_jax.errors import InvalidRequestError
from serve.errors import ApiError


async def read_json_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as a dict.

    Raises ApiError for a wrong content type (415) or size (413), InvalidRequestError for a body
    that is no JSON object.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"Content-Type must be application/json, not {content_type or 'absent'}",
            code="unsupported_media_type",
        )
    body = await _read(request, max_bytes)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"the body must be a JSON object, not {_json_type(value)}", code="invalid_json"
        )
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    # Closing saves reading the rest, which keep-alive would have to.
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "an array")
