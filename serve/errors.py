"""Every error a client sees: `{"error": {"message", "type", "param", "code"}}` and its status."""

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from qwen35_jax.engine.thread import EngineError
from qwen35_jax.errors import InvalidRequestError

# A message may quote what the client sent, which may be megabytes.
MAX_MESSAGE_CHARACTERS = 500

CLIENT_CLOSED_REQUEST = 499


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An answer with a status of its own. `param` and `code` are as in InvalidRequestError."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def error_json(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The error object as JSON; `status` decides its type."""
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, code)))


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(
        error_json(status, message, param=param, code=code),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(
        error.status, str(error), param=error.param, code=error.code, headers=error.headers
    )


def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequestError)
    return error_response(400, str(error), param=error.param, code=error.code)


def _on_engine_error(request: Request, error: Exception) -> Response:
    return error_response(503, str(error), code="engine_unavailable")


def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path or a method that the path doesn't have."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return error_response(
            405,
            f"{path} does not take {request.method}, only {allowed}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )
    if error.status_code == 404:
        message = f"there is nothing at {path}; there are {', '.join(_paths(request))}"
        return error_response(404, message, code="not_found")
    return error_response(error.status_code, error.detail)


def _paths(request: Request) -> list[str]:
    return [route.path for route in request.app.routes if "{" not in route.path]


def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(500, "internal error; the server's log has the details")


EXCEPTION_HANDLERS: Mapping[type[Exception], ExceptionHandler] = {
    ApiError: _on_api_error,
    InvalidRequestError: _on_invalid_request,
    EngineError: _on_engine_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_disconnect,
    Exception: _on_bug,
}
