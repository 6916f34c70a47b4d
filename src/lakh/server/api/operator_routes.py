"""Routes for operators: load and unload models and adapters while the server runs.

    POST /v1/models/load             {"model": NAME, "path": MODEL}
    POST /v1/models/unload           {"model": NAME}
    POST /v1/load_lora_adapter       {"lora_name": NAME, "lora_path": FOLDER, "model": its base}, as in vLLM
    POST /v1/unload_lora_adapter     {"lora_name": NAME}

Paths are those of the server's machine, so every route needs the operator's key, which is none of the users' keys.
Without `--operator-key-file` they are a 403.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from lakh.errors import LakhError
from lakh.server.api.json_body import read_json
from lakh.server.request import RequestError

__all__ = ["ModelCatalog", "Operator", "operator_routes"]

log = logging.getLogger(__name__)


class ModelCatalog(Protocol):
    async def load_model(self, name: str, path: str) -> None: ...

    async def unload_model(self, name: str) -> None: ...

    async def load_adapter(self, name: str, folder: str, model: str | None = None) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...


@dataclass(frozen=True)
class Operator:
    key: str
    catalog: ModelCatalog

    def check(self, authorization: str) -> None:
        kind, _, key = authorization.partition(" ")
        given = key.strip().encode("utf-8", "surrogatepass")
        if kind.lower() != "bearer" or not hmac.compare_digest(given, self.key.encode()):
            message = "not the operator's key: send Authorization: Bearer KEY"
            raise RequestError(None, message, status=401, code="invalid_api_key")


def operator_routes(operator: Operator | None) -> list[web.RouteDef]:
    def post(path: str, act: Callable[[ModelCatalog, Mapping[str, Any]], Awaitable[None]]) -> web.RouteDef:
        async def handle(http: web.Request) -> web.Response:
            if operator is None:
                message = "loading and unloading is off: start the server with --operator-key-file"
                raise RequestError(None, message, status=403, code="no_operator")
            operator.check(http.headers.get("Authorization", ""))
            body = await read_json(http)
            if not isinstance(body, Mapping):
                raise RequestError(None, "the body is not a JSON object")
            try:
                await act(operator.catalog, body)
            except LakhError as error:
                raise RequestError(error.where, str(error)) from None
            log.warning("%s %s: done", path, {name: value for name, value in body.items() if isinstance(value, str)})
            return web.json_response({"status": "ok"})

        return web.post(path, handle)

    return [
        post("/v1/models/load", lambda to, body: to.load_model(_text(body, "model"), _text(body, "path"))),
        post("/v1/models/unload", lambda to, body: to.unload_model(_text(body, "model"))),
        post(
            "/v1/load_lora_adapter",
            lambda to, body: to.load_adapter(
                _text(body, "lora_name"),
                _text(body, "lora_path"),
                None if body.get("model") is None else _text(body, "model"),
            ),
        ),
        post("/v1/unload_lora_adapter", lambda to, body: to.unload_adapter(_text(body, "lora_name"))),
    ]


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise RequestError(field, f"{field}: is not a non-empty string")
    return value
