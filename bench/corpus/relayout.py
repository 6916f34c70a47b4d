"""The same code in another layout, made from tree-sitter's tokens: ground truth for exact deduplication.

It does not use lakh's lexer, so that the lexer's mistakes show: comments are removed, moved and rewritten where
tree-sitter finds comments, and blanks change only where the language ignores them.
"""

from __future__ import annotations

import random
from typing import Any

from lakh.corpus.filters.syntax import parser_of

# Parsed as one token, whatever is inside.
ATOMIC = {
    "string", "string_literal", "raw_string_literal", "char_literal", "character_literal", "interpreted_string_literal",
    "template_string", "regex", "rune_literal", "lifetime", "label", "jsx_text", "jsx_element", "jsx_self_closing_element",  # noqa: E501
    "preproc_include", "preproc_def", "preproc_function_def", "preproc_call", "preproc_if", "preproc_ifdef", "preproc_else",  # noqa: E501
    "preproc_elif", "preproc_directive", "text_block", "concatenated_string", "system_lib_string", "loop_label", "escape_sequence",  # noqa: E501
    "hash_bang_line", "html_comment", "shebang",
}  # fmt: skip
COMMENTS = {"comment", "line_comment", "block_comment", "doc_comment"}
OPEN, CLOSE = {"(", "[", "{"}, {")", "]", "}"}
FREE = {"c", "cpp", "java", "rust"}  # a line end means nothing outside preprocessor lines


def relayout(text: str, language: str, rng: random.Random) -> str | None:
    """The text in another layout; None if tree-sitter cannot parse it."""
    data = text.replace("\r\n", "\n").encode()
    tree = parser_of(language).parse(data)
    if tree.root_node.has_error:
        return None
    leaves: list[Any] = []
    _leaves(tree.root_node, leaves)
    out: list[bytes] = []
    at, depth = 0, 0
    note = b"# note %d" if language == "python" else b"// note %d"
    for place, (begin, end, is_comment, is_atomic) in enumerate(leaves):
        gap = data[at:begin]
        if is_comment:
            # a comment is replaced by its line end or a blank
            out.append(_gap(gap, depth, language, rng, b""))
            if place == 0 and data[begin : begin + 2] == b"#!":
                out.append(data[begin:end])
            elif data[begin:end].endswith(b"\n"):
                out.append(b"\n")
            elif out[-1][-1:] not in (b" ", b"\n"):
                out.append(b" ")
            at = end
            continue
        token = data[begin:end]
        if gap or (place and rng.random() < 0.15 and _may_part(data, at, token, language, is_atomic)):
            out.append(_gap(gap or b" ", depth, language, rng, note % rng.randrange(99)))
        if token in (b"(", b"[", b"{") or (language == "python" and token in (b"${",)):
            depth += 1
        elif token in (b")", b"]", b"}"):
            depth = max(0, depth - 1)
        out.append(token)
        at = end
    out.append(b"\n" * rng.randint(1, 3))
    other = b"".join(out).decode()
    # A form feed resets Python's column, which the new blanks ignore: skip what Python no longer accepts.
    return None if language == "python" and _compiles(text) and not _compiles(other) else other


def _compiles(text: str) -> bool:
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _leaves(root: Any, leaves: list[Any]) -> None:
    queue = [root]
    while queue:
        node = queue.pop()
        if node.start_byte == node.end_byte:
            continue
        atomic = node.type in ATOMIC
        if node.type in COMMENTS or atomic or not node.children:
            leaves.append((node.start_byte, node.end_byte, node.type in COMMENTS, atomic))
        else:
            queue += reversed(node.children)


def _may_part(data: bytes, at: int, token: bytes, language: str, atomic: bool) -> bool:
    """Only beside brackets, commas and semicolons: elsewhere a blank may split an operator."""
    before = data[at - 1 : at]
    if language == "python":
        return before in (b"(", b"[", b",") or token in (b")", b"]", b",")
    return before in (b"(", b"[", b",", b";", b"{") or (token in (b")", b"]", b";", b"}", b",") and not atomic)


def _gap(gap: bytes, depth: int, language: str, rng: random.Random, note: bytes) -> bytes:
    if not gap.strip() and language == "python":
        if depth:
            return rng.choice([b" ", b"\n", b"\n      ", b"  "]) if gap else b""
        if b"\n" in gap:
            indent = gap.rpartition(b"\n")[2]
            columns = len(indent.expandtabs(8)) * 2
            tail = b"  " + note if note and rng.random() < 0.2 else b" " * rng.randrange(2)
            return tail + b"\n" * rng.choice([1, 1, 2, 3]) + b" " * columns
        return b" " * rng.choice([1, 1, 2]) if gap else b""
    if gap.strip() or not gap:
        return gap  # a continuation line, or something that is not in the tree
    if b"\n" in gap:
        tail = b" " + note if note and rng.random() < 0.15 else b""
        return tail + b"\n" * rng.choice([1, 1, 2]) + b" \t"[: rng.randrange(3)] + gap.rpartition(b"\n")[2]
    if language in FREE and rng.random() < 0.1:
        return rng.choice([b"\n", b" /* x */ ", b"\t"])
    return b" " * rng.choice([1, 1, 2, 3])
