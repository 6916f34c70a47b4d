"""JSON schemas of request and response fields, built from the limits that validation uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakh.server.request import MAX_SALT_CHARS, MAX_TIMEOUT_MS
from lakh.server.sampling_params import MAX_STOPS, MAX_TEMPERATURE
from lakh.server.stopping import STOP_RULES

__all__ = [
    "CODE_FIELDS",
    "ENVELOPE",
    "EXTENSION_FIELDS",
    "FINISH_REASON",
    "PROMPT_FIELDS",
    "SAMPLING_FIELDS",
    "USAGE",
    "Schema",
    "array",
    "integer",
    "nullable",
    "object_of",
    "string",
]

Schema = dict[str, Any]


def string(**more: Any) -> Schema:
    return {"type": "string", **more}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def integer(low: int, high: int | None = None) -> Schema:
    return nullable({"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})})


def array(items: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, **({} if most is None else {"maxItems": most})}


def object_of(properties: Schema, required: Sequence[str] = ()) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


ENVELOPE = ("id", "object", "created", "model")
FINISH_REASON = {"enum": ["stop", "length", "abort", None]}
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
USAGE = object_of({name: {"type": "integer"} for name in _COUNTS}, required=_COUNTS)

PROMPT_FIELDS = {"prompt": string(), "suffix": nullable(string())}
SAMPLING_FIELDS = {
    "max_tokens": integer(1),
    "temperature": nullable({"type": "number", "minimum": 0, "maximum": MAX_TEMPERATURE}),
    "top_p": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": integer(0),
    "stop": nullable(
        {"anyOf": [string(minLength=1), {"type": "array", "items": string(minLength=1), "maxItems": MAX_STOPS}]}
    ),
    "stream": nullable({"type": "boolean"}),
}
CODE_FIELDS = {
    "stop_rule": nullable({"enum": list(STOP_RULES)}),
    "order": nullable({"enum": ["psm", "spm"]}),
    "supersede": nullable(string()),
    "user": nullable(string()),
}
EXTENSION_FIELDS = {
    **CODE_FIELDS,
    "timeout_ms": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_MS}),
    "cache_salt": nullable(string(maxLength=MAX_SALT_CHARS)),
    "reuse": nullable({"type": "boolean"}),
    "heal": nullable({"type": "boolean"}),
    "model": nullable(string()),
}
