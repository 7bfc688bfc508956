"""The model that this server serves, and the routes that name it."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qwen35_jax.tokenizer import Tokenizer
from serve.config import ServeConfig
from serve.engine_client import EngineClient
from serve.errors import ApiError
from serve.protocol import ModelCard, ModelList


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Everything that a route needs, kept on the app's state.

    max_model_len: tokens of prompt and answer together.
    created: seconds since the epoch when the server began to serve it.
    """

    config: ServeConfig
    client: EngineClient
    tokenizer: Tokenizer
    max_model_len: int
    created: int

    @property
    def name(self) -> str:
        return self.config.served_model_name

    def check_name(self, name: str | None) -> None:
        """Raises ApiError (404) unless `name` is this model's, or absent."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; this is {self.name!r}",
                param="model",
                code="model_not_found",
            )


def served_model(request: Request) -> ServedModel:
    return request.app.state.served_model


async def list_models(request: Request) -> Response:
    return _json(ModelList(data=[_card(served_model(request))]))


async def show_model(request: Request) -> Response:
    model = served_model(request)
    model.check_name(request.path_params["model_id"])
    return _json(_card(model))


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
