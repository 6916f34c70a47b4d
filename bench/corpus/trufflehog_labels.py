"""Labelled secrets from the pattern tests of a trufflehog checkout: inputs and what a detector must find in them.

trufflehog is AGPL-3.0: its files are read from the path that the user gives, at run time, and nothing of them is in
this repository. A test case is a struct with `input` and `want`; both are evaluated from string literals, package
constants, concatenations and fmt.Sprintf. A case counts if every part evaluates; a wanted value that is not a substring
of its input (several values joined by the detector) is split at the values that are. Addresses (hosts, URLs, e-mail)
that a detector joins to a secret are not secrets and do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh.corpus.filters.syntax import parser_of

__all__ = ["LabelledText", "trufflehog_labels"]


ADDRESS = re.compile(
    r"(?:https?://)?[\w\-]+(?:\.[\w\-]+)*\.[a-z]{2,8}(?::\d+)?(?:/[\w./\-]*)?|[\w.+\-]+@[\w.\-]+\.[a-z]+"
)


@dataclass(frozen=True)
class LabelledText:
    """A text and the secrets in it."""

    name: str
    text: str
    secrets: tuple[str, ...]
    language: str = ""


def trufflehog_labels(checkout: Path) -> Iterator[LabelledText]:
    """The positive cases of pkg/detectors/**/*_test.go."""
    for path in sorted((checkout / "pkg" / "detectors").rglob("*_test.go")):
        if not path.name.endswith("_integration_test.go"):
            yield from _cases(path)


def _cases(path: Path) -> Iterator[LabelledText]:
    root = parser_of("go").parse(path.read_bytes()).root_node
    names: dict[str, Any] = {}
    for node in _walk(root):
        if node.type in ("const_spec", "var_spec"):
            left, right = node.child_by_field_name("name"), node.child_by_field_name("value")
            if left is not None and right is not None and right.named_children:
                names[_text(left)] = right.named_children[0]
        elif node.type == "short_var_declaration":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            if len(left.named_children) == len(right.named_children) == 1:
                names[_text(left)] = right.named_children[0]
    for node in _walk(root):
        if node.type != "literal_value":
            continue
        fields = {}
        for element in node.named_children:
            if element.type == "keyed_element" and len(element.named_children) == 2:
                key, value = element.named_children
                fields[_text(key)] = value.named_children[0] if value.type == "literal_element" else value
        if "input" not in fields or "want" not in fields:
            continue
        text = _string(fields["input"], names)
        wanted = _strings(fields["want"], names)
        pieces = [piece for value in wanted or () for piece in _pieces(value, text or "")]
        secrets = [piece for piece in pieces if not ADDRESS.fullmatch(piece)]
        if text and secrets:
            yield LabelledText(path.parent.name, text, tuple(dict.fromkeys(secrets)))


def _pieces(value: str, text: str) -> list[str]:
    """The value, or the parts of a joined value that are in the text."""
    if value in text:
        return [value]
    for cut in range(8, len(value) - 7):
        for gap in (0, 1):
            if value[:cut] in text and value[cut + gap :] in text:
                return [value[:cut], value[cut + gap :]]
    return []


def _strings(node: Any, names: dict[str, Any]) -> list[str] | None:
    """The items of a []string{...}; None if it is something else."""
    if node.type == "identifier" and _text(node) in names:
        return _strings(names[_text(node)], names)
    if node.type != "composite_literal" or "string" not in _text(node.child_by_field_name("type")):
        return None
    made = []
    for element in node.child_by_field_name("body").named_children:
        value = _string(element.named_children[0] if element.named_children else element, names)
        if value is not None:
            made.append(value)
    return made


def _string(node: Any, names: dict[str, Any], depth: int = 0) -> str | None:
    """The value of a string expression; None if it is not constant."""
    if depth > 8:
        return None
    if node.type == "raw_string_literal":
        return _text(node)[1:-1]
    if node.type == "interpreted_string_literal":
        return _unquoted(_text(node))
    if node.type == "identifier" and _text(node) in names:
        return _string(names[_text(node)], names, depth + 1)
    if node.type == "parenthesized_expression":
        return _string(node.named_children[0], names, depth + 1)
    if node.type == "binary_expression" and _text(node.child_by_field_name("operator")) == "+":
        parts = [_string(node.child_by_field_name(side), names, depth + 1) for side in ("left", "right")]
        return None if None in parts else "".join(part or "" for part in parts)
    if node.type == "call_expression" and _text(node.child_by_field_name("function")) == "fmt.Sprintf":
        form, *values = [
            _string(item, names, depth + 1) for item in node.child_by_field_name("arguments").named_children
        ]
        return None if form is None or None in values else _formatted(form, [value or "" for value in values])
    return None


def _formatted(form: str, values: list[str]) -> str | None:
    wanted = iter(values)
    try:
        return re.sub(r"%[svq]", lambda _: next(wanted), form).replace("%%", "%")
    except (StopIteration, RuntimeError):
        return None


def _unquoted(literal: str) -> str | None:
    try:
        value = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal), strict=False)
    except ValueError:
        return None
    return str(value)


def _walk(root: Any) -> Iterator[Any]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def _text(node: Any) -> str:
    return str(node.text.decode())
