"""The ASGI application: routes, error handlers and request ids."""

import re
import time
import uuid

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35_jax.tokenizer import Tokenizer
from serve.completions import create_completion
from serve.config import ServeConfig
from serve.engine_client import EngineClient
from serve.errors import EXCEPTION_HANDLERS
from serve.health import show_health
from serve.models import ServedModel, list_models, show_model

REQUEST_ID_HEADER = b"x-request-id"
PLAIN_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def create_app(
    *, config: ServeConfig, client: EngineClient, tokenizer: Tokenizer, max_model_len: int
) -> Starlette:
    """The server's routes over one engine.

    max_model_len: tokens that a prompt and its answer may have together. The caller owns the
    engine behind `client` and closes it when the app is done.
    """
    app = Starlette(
        routes=[
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{model_id:path}", show_model),
            Route("/health", show_health),
        ],
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers=dict(EXCEPTION_HANDLERS),
    )
    app.router.redirect_slashes = False
    app.state.served_model = ServedModel(
        config=config,
        client=client,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        created=int(time.time()),
    )
    return app


class RequestIdMiddleware:
    """Answers with the request's x-request-id; with a new one where it has none that is plain."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(REQUEST_ID_HEADER, b"")
        if PLAIN_REQUEST_ID.fullmatch(request_id) is None:
            request_id = uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (REQUEST_ID_HEADER, request_id)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)
