"""The HTTP API as an OpenAPI 3.1 document, served at /openapi.json. A test fuzzes the server by it."""

from __future__ import annotations

from functools import cache

from lakh import __version__
from lakh.server.api.dialects import Dialect, dialects_by_path
from lakh.server.api.request_handler import FEEDBACK
from lakh.server.api.responses import OLLAMA_PATHS
from lakh.server.api.schema import Schema, integer, nullable, object_of, string

__all__ = ["document"]

_MODEL = object_of({"id": string()}, required=["id", "object"])
_STATUS = object_of({"status": string()})
_ERROR_FIELDS = {"message": string(), "type": string(), "param": nullable(string()), "code": nullable(string())}
_ERROR = object_of({"error": object_of(_ERROR_FIELDS)})
_OLLAMA_ERROR = object_of({"error": string()})
_ERRORS = {
    "400": "invalid request",
    "401": "no valid key",
    "404": "no such model",
    "408": "the body did not arrive in time",
    "409": "superseded by a newer request",
    "413": "the body is too large",
    "429": "the queue is full or a quota is exceeded",
    "503": "not available now",
}


@cache
def document() -> Schema:
    feedback = object_of({"event": {"enum": list(FEEDBACK)}})
    totals = object_of({kind: integer(0) for kind in FEEDBACK})
    models = object_of({"data": {"type": "array", "items": _MODEL}}, required=["object", "data"])
    model = _get("One model", _MODEL)
    model["get"]["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": string(minLength=1)}]
    model["get"]["responses"]["404"] = _error("no such model")
    page = {"200": {"description": "metrics", "content": {"text/plain": {"schema": string()}}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lakh",
            "version": __version__,
            "description": "Code completions from a lakh engine or gateway. Unknown fields are ignored.",
        },
        "paths": {
            **{path: _completion(path, among) for path, among in dialects_by_path().items()},
            "/v1/feedback": _post("What the user did with a suggestion", feedback, totals, streams=False),
            "/v1/models": _get("Served models", models),
            "/v1/models/{model}": model,
            "/health": _get("Liveness", _STATUS, also=("503",)),
            "/ready": _get("Readiness", _STATUS, also=("503",)),
            "/metrics": {"get": {"summary": "Prometheus text format", "responses": page}},
            "/openapi.json": _get("This document", {"type": "object"}),
        },
        "components": {
            "schemas": {"Error": _ERROR, "OllamaError": _OLLAMA_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _completion(path: str, among: list[Dialect]) -> Schema:
    requests, responses = [one.request_schema for one in among], [one.response_schema for one in among]
    summary = "; ".join(one.summary for one in among)
    if len(among) == 1:
        return _post(
            summary, requests[0], responses[0], error="OllamaError" if path.startswith(OLLAMA_PATHS) else "Error"
        )
    return _post(summary, {"anyOf": requests}, {"anyOf": responses})


def _post(summary: str, request: Schema, response: Schema, *, streams: bool = True, error: str = "Error") -> Schema:
    content: Schema = {"application/json": {"schema": response}}
    if streams:
        content["text/event-stream"] = {"schema": object_of({"data": string()}, ())}  # one event
        content["application/x-ndjson"] = {"schema": {}}  # Ollama's form: one JSON object per line
    retry = {"headers": {"Retry-After": {"schema": string()}}}
    errors = {
        status: _error(text, error) | (retry if status in ("429", "503") else {}) for status, text in _ERRORS.items()
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
            "responses": {"200": {"description": "completed", "content": content}, **errors},
        }
    }


def _get(summary: str, response: Schema, also: tuple[str, ...] = ()) -> Schema:
    described = {"description": summary, "content": {"application/json": {"schema": response}}}
    return {"get": {"summary": summary, "responses": dict.fromkeys(("200", *also), described)}}


def _error(text: str, name: str = "Error") -> Schema:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
