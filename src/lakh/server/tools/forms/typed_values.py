"""Values of arguments between tags: plain text where the schema says string, and JSON elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lakh.server.tools.forms.tool_form import argument_text, lark_json, lark_plain, lark_text
from lakh.server.tools.json_scanner import json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["argument_rules", "is_text", "properties_of", "read_arguments"]

MAX_DEPTH = 8


def read_arguments(pattern: re.Pattern[str], text: str, schema: object) -> str | None:
    """The arguments that a text consists of, as JSON; None if there is anything else in it. `pattern` matches one of
    them, its key and its value, and `is_text` if the model says that."""
    properties = properties_of(schema)
    arguments: dict[str, Any] = {}
    at = 0
    while found := pattern.match(text, at):
        named = found.groupdict()
        key, value, kind = found[1], named.get("value", found[2]), named.get("is_text")
        schema = properties.get(key) if kind is None else {"type": "string" if kind == "true" else "object"}
        arguments[key] = _typed_value(value, schema)
        at = found.end()
    return None if text[at:].strip() else argument_text(arguments)


def argument_rules(
    prefix: str, schema: Mapping[str, Any], before: Callable[[str], str], end: str, *, special: SpecialTokens
) -> tuple[list[str], list[str]]:
    """The arguments of a call in a grammar, and the rules of their values, whose names begin with `prefix`. `before`
    gives what comes before the value of a key, `end` is the text after it."""
    arguments, rules = [], []
    required = schema.get("required")
    for place, (key, inner) in enumerate(properties_of(schema).items()):
        rule = f"{prefix}_{place}"
        rules.append(_value_rule(rule, inner, schema, end, special))
        argument = f"{before(key)} {rule}"
        arguments.append(argument if key in _list_of(required) else f"({argument})?")
    return arguments, rules


def is_text(schema: object) -> bool:
    """A value of it is plain text."""
    return _types(schema) <= {"string"}


def _typed_value(text: str, schema: object) -> Any:
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


def _value_rule(rule: str, schema: object, whole: Mapping[str, Any], end: str, special: SpecialTokens) -> str:
    """The rule of a grammar for a value and the text that ends it. `whole`: the schema that has the definitions."""
    inner = dict(schema) if isinstance(schema, Mapping) else {}
    texts = [inner["const"]] if "const" in inner else inner.get("enum")
    after = lark_text(end, special)
    if is_text(inner) and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return f"{rule}: ({' | '.join(map(lark_plain, texts))}) {after}"
    if is_text(inner) and special.split(end) == [end]:
        return f"{rule}[suffix={after}]: /(.|\\n)*/"
    if is_text(inner):
        return f"{rule}: /(.|\\n)*/ {after}"
    shared = {word: whole[word] for word in ("$defs", "definitions") if word in whole}
    return f"{rule}: value_of_{rule} {after}\nvalue_of_{rule}: {lark_json({**inner, **shared})}"
