"""JSON schemas of request and response fields, built from the limits that validation uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lakh.server.request import MAX_EXTRA, MAX_SALT_CHARS, MAX_TIMEOUT_MS
from lakh.server.sampling.params import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_PENALTY,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from lakh.server.stopping import STOP_RULES
from lakh.server.structured.constraint import MAX_CHOICES
from lakh.server.tools.tool_use import MAX_NAME_CHARS, MAX_TOOLS

__all__ = [
    "CHOICE",
    "COMMON_FIELDS",
    "MESSAGES",
    "OLLAMA_MESSAGES",
    "STOP_REASON",
    "STRUCTURED_FIELDS",
    "TOOL_CALL",
    "TOOL_FIELDS",
    "Schema",
    "array",
    "completion",
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


def object_of(properties: Schema, required: Iterable[str] | None = None) -> Schema:
    """An object that has all `properties`, unless `required` names others."""
    names = list(properties if required is None else required)
    return {"type": "object", "properties": properties, **({"required": names} if names else {})}


CHOICE = {"index": {"type": "integer"}, "finish_reason": {"enum": ["stop", "tool_calls", "length", "abort", None]}}
STOP_REASON = {"stop_reason": {"anyOf": [string(), {"type": "integer"}, {"type": "null"}]}}
USAGE = object_of({name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")})

EXTRA_FILE = object_of({"filename": nullable(string()), "text": string()}, required=["text"])
# The form of the completion: at most one of them.
STRUCTURED_FIELDS: Schema = {
    "response_format": nullable({"type": "object"}),
    "guided_json": nullable({"anyOf": [{"type": "object"}, string()]}),
    "guided_regex": nullable(string()),
    "guided_choice": nullable(array(string(minLength=1), MAX_CHOICES)),
    "guided_grammar": nullable(string()),
    "structured_outputs": nullable({"type": "object"}),
}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_BIAS = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
_ID_TEXT = string(pattern="^(0|[1-9][0-9]{0,8})$")
_WORD = string(minLength=1, maxLength=MAX_BAD_WORD_CHARS)
_FUNCTION = object_of(
    {
        "name": string(minLength=1, maxLength=MAX_NAME_CHARS, pattern="^[a-zA-Z0-9_.-]+$"),
        "description": nullable(string()),
        "parameters": nullable({"type": "object"}),
        "strict": nullable({"type": "boolean"}),
    },
    required=["name"],
)
_NAMED = object_of({"type": {"const": "function"}, "function": object_of({"name": string()})})
TOOL_FIELDS: Schema = {
    "tools": nullable(
        {
            "type": "array",
            "items": object_of({"type": {"const": "function"}, "function": _FUNCTION}),
            "maxItems": MAX_TOOLS,
        }
    ),
    "tool_choice": nullable({"anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED]}),
    "parallel_tool_calls": nullable({"type": "boolean"}),
}
TOOL_CALL = object_of(
    {
        "id": string(),
        "type": {"const": "function"},
        "function": object_of({"name": string(), "arguments": string()}),
    }
)


def _messages(call: Schema) -> Schema:
    """Texts, calls of tools, and their results."""
    said = object_of({"role": string(), "content": string()})
    called = object_of({"role": {"const": "assistant"}, "content": nullable(string()), "tool_calls": array(call)})
    result = object_of({"role": {"const": "tool"}, "content": string(), "tool_call_id": string()})
    return array({"anyOf": [said, called, result]})


MESSAGES = _messages(TOOL_CALL)
OLLAMA_MESSAGES = _messages(object_of({"function": object_of({"name": string(), "arguments": {"type": "object"}})}))
COMMON_FIELDS = {
    "prompt": string(),
    "suffix": nullable(string()),
    "max_tokens": integer(1),
    "temperature": nullable({"type": "number", "minimum": 0, "maximum": MAX_TEMPERATURE}),
    "top_p": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": integer(-1),
    "min_p": nullable({"type": "number", "minimum": 0, "maximum": 1}),
    "min_tokens": integer(0),
    "repetition_penalty": nullable({"type": "number", "minimum": MIN_REPETITION_PENALTY, "maximum": MAX_PENALTY}),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        nullable({"type": "number", "minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}),
    ),
    "stop": nullable(
        {"anyOf": [string(minLength=1), {"type": "array", "items": string(minLength=1), "maxItems": MAX_STOPS}]}
    ),
    "stop_token_ids": nullable({**_TOKEN_IDS, "maxItems": MAX_STOP_IDS}),
    "include_stop_str_in_output": nullable({"type": "boolean"}),
    "ignore_eos": nullable({"type": "boolean"}),
    "logit_bias": nullable({"type": "object", "additionalProperties": _BIAS, "propertyNames": _ID_TEXT}),
    "allowed_token_ids": nullable({**_TOKEN_IDS, "minItems": 1, "maxItems": MAX_ALLOWED_IDS}),
    "bad_words": nullable({"type": "array", "items": _WORD, "maxItems": MAX_BAD_WORDS}),
    "stream": nullable({"type": "boolean"}),
    "stop_rule": nullable({"enum": list(STOP_RULES)}),
    "order": nullable({"enum": ["psm", "spm"]}),
    "supersede": nullable(string()),
    "user": nullable(string()),
    "timeout_ms": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_MS}),
    "generation_ms": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_MS}),
    "cache_salt": nullable(string(maxLength=MAX_SALT_CHARS)),
    "reuse": nullable({"type": "boolean"}),
    "heal": nullable({"type": "boolean"}),
    "input_extra": nullable({"type": "array", "items": EXTRA_FILE, "maxItems": MAX_EXTRA}),
    "parse_special": nullable({"type": "boolean"}),
    "model": nullable(string()),
}


def completion(choice: Schema) -> Schema:
    """A response in OpenAI's envelope."""
    fields = {"id": string(), "model": string(), "choices": {"type": "array", "items": choice}, "usage": USAGE}
    return object_of(fields, required=["object", "created", *fields])
