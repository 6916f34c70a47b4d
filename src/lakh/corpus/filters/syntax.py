"""The share of a text that does not parse, measured on tree-sitter's syntax tree.

Not `has_error`: one macro in a C header sets it and says nothing about the other thousand lines. Grammars come as
single-language packages. C headers that fail as C are tried as C++. Hostile text can make a parser quadratic, so the
first PARSED_BYTES of a text are parsed alone; the whole text is parsed only if they look bad (the cut itself may break
a string or a class). A parse stops after `cpu_s` of processor time.

Cost: 0.1-0.25 s per MB, the most expensive part of a build.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from lakh.corpus.parsing.languages import LANGUAGES

__all__ = ["GRAMMARS", "PARSED_BYTES", "error_share", "parser_of"]

GRAMMARS: dict[str, str] = {name: row["grammar"] for name, row in LANGUAGES.items() if "grammar" in row}
GRAMMARS["tsx"] = "tree_sitter_typescript:language_tsx"  # .tsx files have their own grammar
PARSED_BYTES = 16_384
CHUNK_BYTES = 4096  # the parser asks for more, and the clock is checked, this often


def error_share(data: bytes, language: str, path: str = "", *, limit: float = 0.1, cpu_s: float = 10.0) -> float:
    """Bytes outside the tree over bytes parsed; 0 for a language without a grammar, 1 for a parse that is too slow.

    Parsing stops early once the share is within `limit`.
    """
    suffix = PurePosixPath(path).suffix.lower()
    grammars = ["tsx" if suffix == ".tsx" else language]
    if language == "c" and suffix == ".h":
        grammars.append("cpp")
    share = 0.0
    for text in _beginnings(data):
        shares = []
        for grammar in grammars:
            shares.append(_error_share(text, grammar, cpu_s))
            if shares[-1] <= limit / 4:  # good enough to skip the other grammar
                break
        share = min(shares)
        if share <= limit:
            break
    return share


def _beginnings(data: bytes) -> Iterator[bytes]:
    """The first PARSED_BYTES up to a line end, then everything."""
    if len(data) > PARSED_BYTES:
        yield data[: data.rfind(b"\n", 0, PARSED_BYTES) + 1 or PARSED_BYTES]
    yield data


def _error_share(data: bytes, language: str, cpu_s: float) -> float:
    parser = parser_of(language)
    if parser is None or not data:
        return 0.0
    deadline = time.thread_time() + cpu_s
    late = False

    def read(offset: int, _: Any) -> bytes:
        nonlocal late
        late = late or time.thread_time() > deadline
        return b"" if late else data[offset : offset + CHUNK_BYTES]  # no bytes: end of input for the parser

    tree = parser.parse(read)
    return 1.0 if late or tree is None else min(_error_bytes(tree.root_node) / len(data), 1.0)


def _error_bytes(root: Any) -> int:
    """Bytes of ERROR nodes not covered by a valid named child; a missing token counts as one byte."""
    total = 0
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.is_missing:
            total += 1
        if not node.has_error:
            continue
        children = node.children
        if node.is_error:
            total += node.end_byte - node.start_byte
            total -= sum(child.end_byte - child.start_byte for child in children if child.is_named)
            waiting += [child for child in children if child.is_named]
        else:
            waiting += [child for child in children if child.has_error or child.is_missing]
    return total


@lru_cache(maxsize=32)
def parser_of(language: str) -> Any:
    """The tree-sitter parser of a language; None without a grammar."""
    if language not in GRAMMARS:
        return None
    module, _, function = GRAMMARS[language].partition(":")
    try:
        import tree_sitter

        grammar = getattr(importlib.import_module(module), function)()
    except ImportError:
        return None
    return tree_sitter.Parser(tree_sitter.Language(grammar))
