"""What a file imports: Python, JavaScript and TypeScript, and C's quoted includes. Reads text that may not parse."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Import", "imports_of"]

_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]*)", re.MULTILINE)
_MODULE = r"[\w.]+(?:[ \t]+as[ \t]+\w+)?"
_IMPORT = re.compile(rf"^[ \t]*import[ \t]+({_MODULE}(?:[ \t]*,[ \t]*{_MODULE})*)", re.MULTILINE)
_ES_FROM = re.compile(r"^\s*(?:import|export)\s+(?:type\s+)?([^'\";]*?)\s*from\s*['\"](\.[^'\"\n]*)['\"]", re.MULTILINE)
_REQUIRE = re.compile(r"(?:const|let|var)\s+(\{[^}]*\}|[\w$]+)\s*=\s*require\(\s*['\"](\.[^'\"\n]*)['\"]", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#\s*include\s+\"([^\"\n]+)\"", re.MULTILINE)
_AS = re.compile(r"\s+as\s+|\s*:\s*")
_NAME = re.compile(r"[\w$]+\Z")
_DOTTED = re.compile(r"[\w.]+\Z")


class Import(NamedTuple):
    module: str
    """Dotted in Python, with the dots of a relative import; a path elsewhere."""
    name: str
    """As the module defines it; "" for the whole module."""
    bound: str
    """As the importing file calls it; "" if it gets no name of its own."""


def imports_of(text: str, extension: str) -> list[Import]:
    """In the order of the file; an unknown extension has none."""
    if extension in (".py", ".pyi"):
        return _of_python(text)
    if extension in (".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".mts", ".cts"):
        return _of_javascript(text)
    if extension in (".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh"):
        return [Import(path, "", "") for path in _INCLUDE.findall(text)]
    return []


def _of_python(text: str) -> list[Import]:
    found = [Import(module, *pair) for module, names in _FROM.findall(text) if module for pair in _pairs(names)]
    for modules in _IMPORT.findall(text):
        for module, bound in _pairs(modules, dotted=True):
            found.append(Import(module, "", bound))
    return found


def _of_javascript(text: str) -> list[Import]:
    found = []
    for names, path in [*_ES_FROM.findall(text), *_REQUIRE.findall(text)]:
        outside, brace, inside = names.partition("{")
        whole = outside.replace("*", "").replace(" as ", " ").strip(" ,\n")
        if whole and _NAME.match(whole):
            found.append(Import(path, "", whole))
        if brace:
            found += [Import(path, *pair) for pair in _pairs(inside.partition("}")[0].replace("type ", ""))]
    return found


def _pairs(names: str, *, dotted: bool = False) -> list[tuple[str, str]]:
    """The names of a list and what they are bound to."""
    lines = [line.partition("#")[0] for line in names.strip("() \t\n").split("\n")]
    pairs = []
    for item in " ".join(lines).split(","):
        name, *alias = _AS.split(item.strip(" ()\t\r\\"))
        if _DOTTED.match(name) if dotted else _NAME.match(name):
            pairs.append((name, alias[0] if alias else name))
    return pairs
