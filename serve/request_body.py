"""A request body as a JSON object, within its size limit."""

import re
from typing import Any

import msgspec
from starlette.requests import Request

from qwen35_jax.errors import InvalidRequestError
from serve.errors import ApiError

# msgspec looks for the other half of a pair before it looks at what is there: with fewer than six
# bytes left it calls the body truncated.
LONE_SURROGATE_AT_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\].{0,4}\Z", re.DOTALL)


async def read_json_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as a dict.

    Raises ApiError for a wrong content type or encoding (415) or size (413), InvalidRequestError
    for a body that is no JSON object.
    """
    _check_headers(request)
    body = await _read(request, max_bytes)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = "Invalid Unicode surrogate" if LONE_SURROGATE_AT_END.search(body[-16:]) else error
        raise InvalidRequestError(
            f"the body is not valid JSON: {problem}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"the body must be a JSON object, not {_json_type(value)}", code="invalid_json"
        )
    return value


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type, *parameters = content_type.split(";")
    if media_type.strip().lower() != "application/json":
        raise _unsupported(f"Content-Type must be application/json, not {content_type or 'absent'}")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in ("utf-8", "utf8"):
            raise _unsupported(f"charset {charset!r} is not supported; send the body as utf-8")
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if encoding.strip().lower() not in ("", "identity"):
        raise _unsupported(
            f"Content-Encoding {encoding!r} is not supported; send the body as it is"
        )


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


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
