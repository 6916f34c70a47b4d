"""Tabby's POST /v1/completions: segments around the cursor and snippets of other files, for Tabby's editor extensions.

Tabby uses OpenAI's path with another body: one that has `segments` is Tabby's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.request import RequestError
from lakh.server.sampling.params import MAX_SEED

__all__ = ["TABBY"]

MAX_TOKENS = 64
TEMPERATURE = 0.1  # Tabby's default
# The most relevant last: declarations of what the cursor's line uses.
_SNIPPETS = (
    "relevant_snippets_from_recently_opened_files",
    "relevant_snippets_from_changed_files",
    "declarations",
)


def _to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    segments = body.get("segments")
    if not isinstance(segments, Mapping):
        raise RequestError("segments", "segments: is not an object")
    suffix = segments.get("suffix")
    return {
        "prompt": segments.get("prefix"),
        "suffix": "" if suffix is None else suffix,
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE if body.get("temperature") is None else body["temperature"],
        "seed": body.get("seed"),
        "user": body.get("user"),
        "input_extra": [file for name in _SNIPPETS for file in _files(segments, name)],
    }


def _files(segments: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    snippets = segments.get(name) or []
    if not isinstance(snippets, list) or not all(isinstance(snippet, Mapping) for snippet in snippets):
        raise RequestError(name, f"segments.{name}: is not a list of snippets")
    return [{"filename": snippet.get("filepath"), "text": snippet.get("body")} for snippet in snippets]


def _render(response: DialectResponse) -> dict[str, Any]:
    choices = [{"index": choice["index"], "text": choice["text"]} for choice in response.choices]
    return {"id": response.envelope["id"], "choices": choices, "mode": "standard"}


_SNIPPET = schema.object_of({"filepath": schema.string(), "body": schema.string()}, required=["body"])
_SEGMENTS = schema.object_of(
    {
        "prefix": schema.string(),
        "suffix": schema.nullable(schema.string()),
        **dict.fromkeys(_SNIPPETS, schema.nullable({"type": "array", "items": _SNIPPET, "maxItems": 64})),
    },
    required=["prefix"],
)

TABBY = Dialect(
    path="/v1/completions",
    summary="Tabby's form",
    to_openai=_to_openai,
    render=_render,
    request_schema=schema.object_of(
        {
            "segments": _SEGMENTS,
            "language": schema.nullable(schema.string()),
            "user": schema.nullable(schema.string()),
            "temperature": schema.COMMON_FIELDS["temperature"],
            "seed": schema.integer(0, MAX_SEED),
        },
        required=["segments"],
    ),
    response_schema=schema.object_of(
        {
            "id": schema.string(),
            "choices": {
                "type": "array",
                "items": schema.object_of({"index": {"type": "integer"}, "text": schema.string()}),
            },
        }
    ),
    is_meant=lambda body: "segments" in body and "prompt" not in body,
)
