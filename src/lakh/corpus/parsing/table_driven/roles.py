"""The row of a token in the table of roles, by its name or, where programs define operators, by its characters."""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import hash_bytes, hash_of
from lakh.corpus.parsing.word_table import NO_ROW, row_of

__all__ = ["NO_ROLE", "infix_operator", "operator_bytes", "own_operator"]

NO_ROLE = NO_ROW

APPEND, EQUAL, PLUS, POWER, TIMES = (hash_of(word) for word in ("@", "=", "+", "**", "*"))
ASSIGN = hash_of("+=")
BY_FIRST = np.zeros((2, 128), np.int64)
"""An operator of syntax.toml for each first character of an operator of Scala: it associates to the left or (when its
last character is a colon) to the right. The characters that are not listed in the specification are the tightest."""
for _first, _left, _right in (
    ("|", "|", "|:"), ("^", "^", "^:"), ("&", "&", "&:"), ("=!", "==", "=:"), ("<>", "<", "<<:"), (":", ":+", "::"),
    ("+-", "+", "+:"), ("*/%", "*", "*:"), ("#?@\\~", "~>", "~:"),
):  # fmt: skip
    for _character in _first.encode():
        BY_FIRST[0, _character], BY_FIRST[1, _character] = hash_of(_left), hash_of(_right)


@compiled
def operator_bytes(data: Any, i: int, end: int, known: Any) -> int:
    """The size of the operator at `i` that is not ASCII, as ∘; 0 if there is none."""
    if data[i] < 0xC2:
        return 0
    size = 2 + (data[i] >= 0xE0)
    return size if i + size <= end and row_of(known, hash_bytes(data, i, i + size)) != NO_ROLE else 0


@compiled
def own_operator(data: Any, begin: int, end: int, known: Any) -> Any:
    """The row of an operator that a program of OCaml defines: its first character decides."""
    c = data[begin]
    if c == 42 and data[begin + 1] == 42:
        return row_of(known, POWER)
    if c == 42 or c == 47 or c == 37:
        return row_of(known, TIMES)
    if c == 43 or c == 45:
        return row_of(known, PLUS)
    if c == 64 or c == 94:
        return row_of(known, APPEND)
    return row_of(known, EQUAL) if c in (36, 38, 60, 61, 62, 124) else NO_ROLE


@compiled
def infix_operator(data: Any, begin: int, end: int, known: Any) -> Any:
    """The row of an operator of Scala: its first character decides, and whether its last one is a colon."""
    c, last = data[begin], data[end - 1]
    size = end - begin
    if c >= 128 or BY_FIRST[0, c] == 0:
        return NO_ROLE
    if size == 1 and c in (35, 58, 64):  # : # @ are no operators
        return NO_ROLE
    if size == 2 and ((last == 58 and (c == 60 or c == 62)) or (c == 60 and last == 37)):  # <: >: <%
        return NO_ROLE
    if size == 3 and last == 62 and ((c == 61 and data[begin + 1] == 62) or (c == 63 and data[begin + 1] == 61)):
        return NO_ROLE  # =>> ?=>
    if last == 61 and c != 61 and not (size == 2 and c in (33, 60, 62)):  # +=, not <=
        return row_of(known, ASSIGN)
    return row_of(known, BY_FIRST[1 if last == 58 else 0, c])
