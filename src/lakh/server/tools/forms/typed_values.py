"""Values of arguments between tags: plain text where the schema says string, and JSON elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.tools.forms.tool_form import lark_json, lark_plain
from lakh.server.tools.json_scanner import json_of

__all__ = ["properties_of", "required_of", "typed_value", "value_rule"]

MAX_DEPTH = 8


def typed_value(text: str, schema: object) -> Any:
    """By the type in its schema; a value that has not this type stays text."""
    types = _types(schema)
    if not types or types == {"string"}:
        return text
    if types == {"boolean"} and text.strip() in ("True", "False"):  # as Python writes them
        return text.strip() == "True"
    value = json_of(text.strip())
    is_null = value is None and text.strip() == "null" and "null" in types
    if "string" in types and not is_null:
        return text
    return text if value is None and not is_null else value


def properties_of(schema: object) -> Mapping[str, Any]:
    """What a client sends as a schema may be anything."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> list[Any]:
    return _list_of(schema.get("required"))


def _types(schema: object, depth: int = 0) -> set[str]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    kind = schema.get("type")
    found = {one for one in _list_of(kind) if isinstance(one, str)} | ({kind} if isinstance(kind, str) else set())
    for word in ("anyOf", "oneOf", "allOf"):
        for inner in _list_of(schema.get(word)):
            found |= _types(inner, depth + 1)
    if not found and "$ref" in schema:
        found = {"object"}
    return found


def _list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def value_rule(rule: str, schema: object, whole: Mapping[str, Any], end: str) -> str:
    """The rule of a grammar for a value and the text that ends it. `whole`: the schema that has the definitions."""
    inner = dict(schema) if isinstance(schema, Mapping) else {}
    texts = [inner["const"]] if "const" in inner else inner.get("enum")
    if _types(inner) <= {"string"} and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return f"{rule}: ({' | '.join(map(lark_plain, texts))}) {lark_plain(end)}"
    if _types(inner) <= {"string"}:
        return f"{rule}[suffix={lark_plain(end)}]: /(.|\\n)*/"
    shared = {word: whole[word] for word in ("$defs", "definitions") if word in whole}
    return f"{rule}: value_of_{rule} {lark_plain(end)}\nvalue_of_{rule}: {lark_json({**inner, **shared})}"
