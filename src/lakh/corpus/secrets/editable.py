"""Which bytes of a finding may be replaced: those of strings, comments and prose, never an identifier or an escape.

In a language with a grammar, tree-sitter's tree decides: a finding counts only if most of it is in the content of
strings and comments, and only those bytes change. The code around them (a concatenation inside a key block, an
interpolation) stays, so the file parses as before. It costs a parse of the files with findings, which are few. In a
language without a grammar, lakh's lexer tells strings and comments from code. Where bare words are data (Bash,
CMake), a finding must follow a quote, a comment mark or an assignment on its line. Texts that are not code (Markdown,
data) may change anywhere. Escape sequences stay everywhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from lakh.corpus.filters.syntax import parser_of
from lakh.corpus.parsing.languages import LANGUAGES
from lakh.corpus.parsing.text_features import text_mask
from lakh.corpus.secrets.scan import SecretFinding

__all__ = ["editable_findings"]

CONTENTS = frozenset(
    [
        "string_content",
        "string_fragment",
        "multiline_string_fragment",
        "interpreted_string_literal_content",
        "raw_string_literal_content",
        "raw_string_content",
        "comment",
        "line_comment",
        "block_comment",
        "doc_comment",
        "jsx_text",
        "html_comment",
        "hash_bang_line",
    ]
)
"""Nodes whose text is not code; their children (escapes, interpolations) are."""
MACRO_TEXT = "preproc_arg"  # one node, whatever is in it
ESCAPE = re.compile(rb"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[0-7]{3}|.)", re.DOTALL)
MIN_SHARE = 0.6
INTERPOLATION = re.compile(rb"[#$]\{[^}\n]*\}|\$\([^)\n]*\)|\\\([^)\n]*\)|\{\$[^}\n]*\}")
BARE_WORDS = frozenset(("bash", "cmake"))
PROSE = frozenset(("markdown", "restructuredtext", "html"))
OPENS_TEXT = re.compile(rb"[\"'`]|//|#|--|/\*|^\s*\*|;;|^\s*%|^[A-Za-z0-9+/=\s]*$|[:=]\s*$|://|<\w")


def editable_findings(data: bytes, findings: list[SecretFinding], language: str) -> list[SecretFinding]:
    """The findings that may be replaced, each with the spans of its bytes that may change."""
    if not findings:
        return []
    parser = parser_of(language)
    tree = parser.parse(data) if parser is not None else None
    mask = _content_mask(tree.root_node, data) if tree is not None else None
    if mask is None and language in LANGUAGES and language not in PROSE | BARE_WORDS:
        mask = text_mask(data, language)
        for inserted in INTERPOLATION.finditer(data):
            mask[inserted.start() : inserted.end()] = False
    kept = []
    for finding in findings:
        part = data[finding.begin : finding.end]
        editable = np.ones(len(part), bool)
        if mask is not None:
            editable = mask[finding.begin : finding.end].copy()
        elif language in LANGUAGES and language not in PROSE and not _follows_text(data, finding):
            continue
        for escape in ESCAPE.finditer(part):
            editable[escape.start() : escape.end()] = False
        is_letter = np.frombuffer(part, np.uint8) > 32
        if editable.sum() < MIN_SHARE * is_letter.sum():
            continue
        kept.append(replace(finding, spans=_spans(editable, finding.begin)))
    return kept


def _content_mask(root: Any, data: bytes) -> np.ndarray:
    mask = np.zeros(len(data), bool)
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.type in CONTENTS:
            mask[node.start_byte : node.end_byte] = True
            for child in node.children:
                mask[child.start_byte : child.end_byte] = child.type in CONTENTS
        elif node.type == MACRO_TEXT:
            for quoted in re.finditer(rb'"(?:[^"\\\n]|\\.)*"', data[node.start_byte : node.end_byte]):
                mask[node.start_byte + quoted.start() + 1 : node.start_byte + quoted.end() - 1] = True
        else:
            waiting += node.children
    return mask


def _follows_text(data: bytes, finding: SecretFinding) -> bool:
    line = data[data.rfind(b"\n", 0, finding.begin) + 1 : finding.begin]
    return OPENS_TEXT.search(line) is not None


def _spans(editable: np.ndarray, begin: int) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], editable, [False]]).astype(np.int8)))
    return tuple((begin + int(a), begin + int(b)) for a, b in edges.reshape(-1, 2))
