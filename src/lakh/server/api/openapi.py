"""The HTTP face described for machines: OpenAPI 3.1, made from the bounds that requests.py and params.py hold to.

`document()` is what /openapi.json answers. Client generators, gateways and fuzzers read it; a test fuzzes the server by
it, so it cannot drift far from the truth.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from lakh import __version__
from lakh.server.api.request_handler import FEEDBACK
from lakh.server.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_STOPS, MAX_TEMPERATURE
from lakh.server.request import MAX_CHOICES, MAX_SALT_CHARS, MAX_TIMEOUT_MS
from lakh.server.stopping import STOP_RULES

__all__ = ["document"]

Schema = dict[str, Any]


@cache
def document() -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lakh",
            "version": __version__,
            "description": "Code completions from a lakh engine or gateway. Unknown fields are ignored.",
        },
        "paths": {
            "/v1/completions": _post("OpenAI's form, with the text after the cursor as suffix", "Completion", "Answer"),
            "/v1/fim/completions": _post("Mistral's form", "FimCompletion", "ChatAnswer"),
            "/infill": _post("llama.cpp's form", "Infill", "InfillAnswer"),
            "/v1/feedback": _post("What became of a suggestion", "Feedback", "Counted", streams=False),
            "/v1/models": _get("What is served", "Models"),
            "/v1/models/{model}": _model(),
            "/health": _get("Alive", "Status"),
            "/ready": _get("Takes requests", "Status", also=("503",)),
            "/metrics": {
                "get": {
                    "summary": "Prometheus' text",
                    "responses": {"200": {"description": "figures", "content": {"text/plain": {"schema": _text()}}}},
                }
            },
            "/openapi.json": _get("This document", None),
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _post(summary: str, asked: str, answered: str, *, streams: bool = True) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(answered)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": _text()}}}  # of one event
    later = {"Retry-After": {"schema": {"type": "string"}}}
    statuses = {
        "400": "not understood",
        "401": "no valid key",
        "404": "no such model",
        "408": "the body did not come in time",
        "409": "a newer request took this one's place",
        "413": "the body is too large",
    }
    errors: Schema = {status: _error(words) for status, words in statuses.items()}
    errors |= {
        status: _error(words) | {"headers": later}
        for status, words in {"429": "the queue is full or a quota is spent", "503": "not now"}.items()
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
            "responses": {"200": {"description": "answered", "content": content}, **errors},
        }
    }


def _get(summary: str, answered: str | None, also: tuple[str, ...] = ()) -> Schema:
    schema = {"type": "object"} if answered is None else _ref(answered)
    response = {"description": "answered", "content": {"application/json": {"schema": schema}}}
    return {"get": {"summary": summary, "responses": dict.fromkeys(("200", *also), response)}}


def _model() -> Schema:
    found = _get("One of them", "Model")
    found["get"]["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _text(minLength=1)}]
    found["get"]["responses"]["404"] = _error("no such model")
    return found


def _error(words: str) -> Schema:
    return {"description": words, "content": {"application/json": {"schema": _ref("Error")}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _text(**more: Any) -> Schema:
    return {"type": "string", **more}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _whole(low: int, high: int | None = None) -> Schema:
    return _or_null({"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})})


def _number(low: float, high: float) -> Schema:
    return _or_null({"type": "number", "minimum": low, "maximum": high})


def _schemas() -> Schema:
    texts = {"type": "array", "items": _text(), "minItems": 1, "maxItems": MAX_CHOICES}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    drawn = {
        "max_tokens": _whole(1),
        "temperature": _number(0, MAX_TEMPERATURE),
        "top_p": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "top_k": _whole(0),
        "stop": _or_null(
            {"anyOf": [_text(minLength=1), {"type": "array", "items": _text(minLength=1), "maxItems": MAX_STOPS}]}
        ),
        "stream": _or_null({"type": "boolean"}),
    }
    own = {
        "stop_rule": _or_null({"enum": list(STOP_RULES)}),
        "order": _or_null({"enum": ["psm", "spm"]}),
        "supersede": _or_null(_text()),
        "user": _or_null(_text()),
    }
    more = {
        "timeout_ms": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_MS}),
        "cache_salt": _or_null(_text(maxLength=MAX_SALT_CHARS)),
        "reuse": _or_null({"type": "boolean"}),
        "heal": _or_null({"type": "boolean"}),
        "model": _or_null(_text()),
    }
    usage = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    }
    finish = {"enum": ["stop", "length", "abort", None]}
    choice = {
        "type": "object",
        "properties": {
            "index": {"type": "integer"},
            "text": _text(),
            "logprobs": _or_null({"type": "object"}),
            "finish_reason": finish,
        },
        "required": ["index", "text", "logprobs", "finish_reason"],
    }
    message = {
        "type": "object",
        "properties": {
            "index": {"type": "integer"},
            "message": {"type": "object", "properties": {"role": _text(), "content": _text()}},
            "finish_reason": finish,
        },
        "required": ["index", "message", "finish_reason"],
    }
    return {
        "Completion": {
            "type": "object",
            "required": ["prompt"],
            "properties": {
                "prompt": {"anyOf": [_text(), texts, ids, {"type": "array", "items": ids, "minItems": 1}]},
                "suffix": _or_null(_text()),
                "n": _whole(1, MAX_CHOICES),
                "seed": _whole(0, MAX_SEED),
                "logprobs": _whole(0, MAX_LOGPROBS),
                "stream_options": _or_null({"type": "object"}),
                "return_token_ids": _or_null({"type": "boolean"}),
                **drawn,
                **own,
                **more,
            },
        },
        "FimCompletion": {
            "type": "object",
            "required": ["prompt"],
            "properties": {
                "prompt": _text(),
                "suffix": _or_null(_text()),
                "random_seed": _whole(0, MAX_SEED),
                **drawn,
                **own,
                **more,
            },
        },
        "Infill": {
            "type": "object",
            "properties": {
                "input_prefix": _text(),
                "input_suffix": _or_null(_text()),
                "prompt": _or_null(_text()),
                "n_predict": _whole(-1),
                "seed": _whole(-1, MAX_SEED),
                "t_max_predict_ms": _or_null({"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_MS}),
                **{name: schema for name, schema in drawn.items() if name != "max_tokens"},
                **own,
            },
        },
        "Feedback": {
            "type": "object",
            "required": ["event"],
            "properties": {"event": {"enum": list(FEEDBACK)}},
        },
        "Answer": {
            "type": "object",
            "properties": {
                "id": _text(),
                "model": _text(),
                "choices": {"type": "array", "items": choice},
                "usage": usage,
            },
            "required": ["id", "object", "created", "model", "choices", "usage"],
        },
        "ChatAnswer": {
            "type": "object",
            "properties": {"choices": {"type": "array", "items": message}, "usage": usage},
            "required": ["id", "object", "created", "model", "choices", "usage"],
        },
        "InfillAnswer": {
            "type": "object",
            "properties": {"content": _text(), "stop": {"type": "boolean"}},
            "required": ["content", "stop"],
        },
        "Counted": {"type": "object", "properties": {kind: _whole(0) for kind in FEEDBACK}, "required": list(FEEDBACK)},
        "Models": {
            "type": "object",
            "properties": {
                "data": {"type": "array", "items": _ref("Model")},
            },
            "required": ["object", "data"],
        },
        "Model": {"type": "object", "properties": {"id": _text()}, "required": ["id", "object"]},
        "Status": {"type": "object", "properties": {"status": _text()}, "required": ["status"]},
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "properties": {
                        "message": _text(),
                        "type": _text(),
                        "param": _or_null(_text()),
                        "code": _or_null(_text()),
                    },
                    "required": ["message", "type", "param", "code"],
                }
            },
        },
    }
