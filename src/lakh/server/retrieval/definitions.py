"""A file's definitions as outlines: what a caller needs to know, without bodies.

A function's outline is its signature; a class's is its header, its fields and the signatures of its methods; a
constant's is its line. Definitions begin at the left margin, what follows with more indentation belongs to them: this
holds for formatted code of every language here, and for files that do not parse because someone is editing them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lakh.server.retrieval.identifiers import identifiers

__all__ = ["Definition", "definitions_of"]

MAX_HEADER_LINES = 40
MAX_LINE_CHARS = 160
MAX_OUTLINE_CHARS = 1_500

_WORDS_BEFORE = (
    r"(?:(?:export|default|declare|public|private|protected|static|async|abstract|final|unsafe|pub(?:\([^)]*\))?)\s+)*"
)
_DEFINITION = re.compile(
    rf"^\s*{_WORDS_BEFORE}(def|class|function\*?|fn|func|struct|enum|trait|interface|type|impl|object|record|namespace)"
    r"(?:<[^>]*>)?\s+(?:\([^)]*\)\s*)?([A-Za-z_$][\w$]*)"
)
_CONSTANT = re.compile(rf"^{_WORDS_BEFORE}(?:const\s+|let\s+|var\s+)?([A-Za-z_$][\w$]*)\s*(?::[^=]+)?=(?![=>])")
_METHOD = re.compile(r"^\s*(?:[\w<>\[\]*&,.?:@$]+\s+)*[*&]*([A-Za-z_$][\w$]*)\s*\([^;]*(?:\{|=>|,|\()\s*$")
_FIELD = re.compile(r"^\s*(?:[\w<>\[\],.?*&]+\s+)*([A-Za-z_$][\w$]*)\s*[:=?;]")
_NO_METHODS = frozenset(("if", "for", "while", "switch", "catch", "return", "else", "with", "match", "elif", "assert"))
_PLAIN = ("def", "fn", "func", "function", "function*", "type")
_SPECIAL_METHODS = ("__init__", "__call__", "__enter__", "__getitem__", "__iter__")
_DOCSTRING = re.compile(r'^\s*[rRuU]?("""|\'\'\')')


class Definition(NamedTuple):
    name: str
    outline: str
    line: int
    """Its first line, from 0."""
    names: frozenset[str]
    """The identifiers of the outline."""


def definitions_of(text: str) -> list[Definition]:
    """In the order of the file."""
    lines = text.split("\n")
    found: list[Definition] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if not line or line[0].isspace() or _DOCSTRING.match(line):
            at = _after_docstring(lines, at)
            continue
        match = _DEFINITION.match(line)
        name = match.group(2) if match else None
        if match is None and (method := _METHOD.match(line)) and method.group(1) not in _NO_METHODS:
            name = method.group(1)
        if name is None:
            if constant := _CONSTANT.match(line):
                found.append(_definition(constant.group(1), [_shortened(line)], at))
            at += 1
            continue
        end = _block_end(lines, at)
        body = _header_end(lines, at)
        header = _decorators(lines, at) + lines[at:body]
        is_container = match is not None and match.group(1) not in _PLAIN
        outline = header + _members(lines, body, end) if is_container else _closed(header)
        found.append(_definition(name, outline, at))
        at = max(end, at + 1)
    return found


def _definition(name: str, outline: list[str], line: int) -> Definition:
    text = "\n".join(outline)
    if len(text) > MAX_OUTLINE_CHARS:
        text = text[: text.rfind("\n", 0, MAX_OUTLINE_CHARS)] if "\n" in text else text[:MAX_OUTLINE_CHARS]
    return Definition(name, text, line, frozenset(identifiers(text)))


def _members(lines: list[str], start: int, end: int) -> list[str]:
    """Fields and signatures of methods at the first level of a body."""
    inside = next((line for line in lines[start:end] if line.strip() and not _DOCSTRING.match(line)), "")
    indent = len(inside) - len(inside.lstrip())
    members: list[str] = []
    at = start
    while at < end:
        line = lines[at]
        if _DOCSTRING.match(line):
            at = _after_docstring(lines, at)
            continue
        if not line.strip() or len(line) - len(line.lstrip()) != indent:
            at += 1
            continue
        match = _DEFINITION.match(line)
        method = _METHOD.match(line)
        name = match.group(2) if match else method.group(1) if method else ""
        if name and name not in _NO_METHODS:
            after = _header_end(lines, at)
            if not name.startswith("_") or name in _SPECIAL_METHODS:
                members += _decorators(lines, at) + _closed(lines[at:after])
            at = max(after, at + 1)
            continue
        if _FIELD.match(line) and not line.lstrip().startswith(("#", "//", "return", "_")):
            members.append(_shortened(line))
        at += 1
    return members


def _header_end(lines: list[str], at: int) -> int:
    """The line after a signature: where its brackets are closed."""
    depth = 0
    for number in range(at, min(len(lines), at + MAX_HEADER_LINES)):
        code = lines[number].split("#", 1)[0] if "#" in lines[number] else lines[number]
        depth += sum(code.count(bracket) for bracket in "([") - sum(code.count(bracket) for bracket in ")]")
        if depth <= 0:
            return number + 1
    return at + 1


def _block_end(lines: list[str], at: int) -> int:
    """The line after a definition: the next one at the margin that does not close it."""
    for number in range(_header_end(lines, at), len(lines)):
        line = lines[number]
        if line and not line[0].isspace() and not line.startswith(("}", ")", "]", "{")):
            return number
    return len(lines)


def _after_docstring(lines: list[str], at: int) -> int:
    """The line after a docstring that begins here; after this line if none does."""
    match = _DOCSTRING.match(lines[at])
    if match is None:
        return at + 1
    quotes = match.group(1)
    if lines[at].count(quotes) > 1:
        return at + 1
    return next((number + 1 for number in range(at + 1, len(lines)) if quotes in lines[number]), len(lines))


def _decorators(lines: list[str], at: int) -> list[str]:
    first = at
    while first and lines[first - 1].lstrip().startswith("@"):
        first -= 1
    return [_shortened(line) for line in lines[first:at]]


def _closed(header: list[str]) -> list[str]:
    """A signature without its body."""
    last = header[-1].rstrip()
    if last.endswith(":"):
        last += " ..."
    elif last.endswith("{"):
        last = last[:-1].rstrip() + ";"
    return [*header[:-1], last]


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..."
