"""Whether the server can answer requests."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.errors import error_response
from serve.models import served_model


async def show_health(request: Request) -> Response:
    """200 while requests are taken and the engine steps them, else 503 with the reason."""
    reason = served_model(request).client.unavailable_reason
    if reason is not None:
        return error_response(503, reason, code="engine_unavailable")
    return JSONResponse({"status": "ok"})
