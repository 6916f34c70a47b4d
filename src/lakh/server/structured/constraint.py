"""What a request demands of the form of its completion, read from the fields of OpenAI, vLLM, SGLang and llama.cpp.

    response_format       {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}}
    guided_json           a JSON schema, as an object or as text; likewise llama.cpp's and SGLang's json_schema
    guided_regex          a regular expression that the whole completion matches; likewise SGLang's regex
    guided_choice         a list of texts, one of which the completion is
    guided_grammar        a context-free grammar, Lark's or llama.cpp's (GBNF); likewise grammar and ebnf
    structured_outputs    vLLM's newer form: an object with one of json, json_object, regex, choice, grammar

Independent of llguidance: the gateway reads and forwards constraints too.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lakh.errors import ConfigError

__all__ = ["MAX_CHOICES", "ConstraintKind", "OutputConstraint", "find_constraint"]

MAX_CHARS = 1 << 16
MAX_CHOICES = 1024

ConstraintKind = Literal["json", "regex", "choice", "grammar"]
# Field -> kind; an empty text or null means that the field is not used.
_DIRECT: dict[str, ConstraintKind] = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "ebnf": "grammar",
}


@dataclass(frozen=True)
class OutputConstraint:
    """The form of a completion. Raises a ConfigError that names `field` if it is too long."""

    kind: ConstraintKind
    text: str
    """The schema or the list of choices as JSON, the regular expression, or the grammar."""
    field: str = field(default="structured_outputs", compare=False)
    """The field of the request that states it, for error messages."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise ConfigError(self.field, f"has {len(self.text)} characters", f"give at most {MAX_CHARS}")

    def as_structured_outputs(self) -> dict[str, Any]:
        """vLLM's form, for another engine."""
        return {self.kind: json.loads(self.text) if self.kind in ("json", "choice") else self.text}


def find_constraint(data: Mapping[str, Any]) -> OutputConstraint | None:
    """The constraint of a request body. Raises a ConfigError that names the field."""
    found = [_direct(kind, name, data[name]) for name, kind in _DIRECT.items() if data.get(name) not in (None, "")]
    for name, read in (("response_format", _response_format), ("structured_outputs", _structured_outputs)):
        constraint = None if data.get(name) is None else read(data[name])
        if constraint is not None:
            found.append(constraint)
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise ConfigError(found[1].field, f"{names} both state the form of the completion", "give only one of them")
    return found[0] if found else None


def _direct(kind: ConstraintKind, name: str, value: Any) -> OutputConstraint:
    if kind == "json":
        return OutputConstraint(kind, _schema_text(name, value), name)
    if kind == "choice":
        return OutputConstraint(kind, _choices_text(name, value), name)
    if not isinstance(value, str):
        raise ConfigError(name, f"{reprlib.repr(value)} is not a string", "give a string")
    return OutputConstraint(kind, value, name)


def _response_format(value: Any) -> OutputConstraint | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp takes a schema here too
        return _direct("json", name, value.get("schema") or {"type": "object"})
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is None:
            raise ConfigError(name, "json_schema has no schema", 'give {"json_schema": {"schema": {...}}}')
        return _direct("json", name, schema)
    raise ConfigError(name, f"{reprlib.repr(value)} is not supported", "give type text, json_object or json_schema")


def _structured_outputs(value: Any) -> OutputConstraint | None:
    name = "structured_outputs"
    kinds: dict[str, ConstraintKind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    options = dict(value) if isinstance(value, Mapping) else {"": value}
    found = {key: one for key, one in options.items() if one not in (None, False)}
    if found.get("json_object") is True:
        found["json"] = found.get("json", {"type": "object"})
        del found["json_object"]
    if not found:
        return None
    if len(found) > 1 or not found.keys() <= kinds.keys():
        todo = f"give an object with one of {', '.join(kinds)}, json_object"
        raise ConfigError(name, f"{reprlib.repr(value)} is not supported", todo)
    ((key, one),) = found.items()
    return _direct(kinds[key], name, one)


def _schema_text(name: str, value: Any) -> str:
    """A JSON schema as text. Keys keep their order: properties are generated in it."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise ConfigError(name, "is not JSON", "give a JSON schema") from None
    if not isinstance(schema, dict):
        raise ConfigError(name, f"{reprlib.repr(schema)} is not an object", "give a JSON schema")
    return text


def _choices_text(name: str, value: Any) -> str:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not is_list or not all(isinstance(one, str) and one for one in value):
        found = f"{reprlib.repr(value)} is not a list of 1 to {MAX_CHOICES} non-empty texts"
        raise ConfigError(name, found, 'give a list such as ["yes", "no"]')
    return json.dumps(value)
