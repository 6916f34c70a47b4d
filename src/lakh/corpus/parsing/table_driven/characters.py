"""Small tests of bytes. Kernels of lexer.py."""

from __future__ import annotations

from typing import Any

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import hash_bytes

__all__ = ["begins_line", "hash_lower", "is_end_mark", "is_operator_character", "is_symbol", "line_breaks"]


@compiled
def hash_lower(data: Any, begin: int, end: int, lower: Any) -> Any:
    for i in range(begin, end):
        c = data[i]
        lower[i - begin] = c | 32 if 65 <= c <= 90 else c
    return hash_bytes(lower, 0, end - begin)


@compiled
def begins_line(data: Any, i: int, begin: int) -> bool:
    while i > begin and (data[i - 1] == 32 or data[i - 1] == 9):
        i -= 1
    return i == begin or data[i - 1] == 10


@compiled
def line_breaks(data: Any, begin: int, end: int) -> int:
    found = 0
    for i in range(begin, end):
        found += data[i] == 10
    return found


@compiled
def is_symbol(c: int) -> bool:
    """Whether a byte may be in an operator that a program of Haskell or OCaml defines."""
    return c in (33, 35, 36, 37, 38, 42, 43, 45, 46, 47, 58, 60, 61, 62, 63, 64, 92, 94, 124, 126)


@compiled
def is_operator_character(c: int) -> bool:
    """Whether a byte may be in an operator of Scala, where . and $ may not."""
    return c != 46 and c != 36 and is_symbol(c)


@compiled
def is_end_mark(data: Any, i: int, j: int) -> bool:
    """__END__ or __DATA__: the program ends there."""
    if j - i == 7:
        return data[i] == 95 and data[i + 2] == 69 and data[i + 3] == 78 and data[i + 4] == 68
    return j - i == 8 and data[i] == 95 and data[i + 2] == 68 and data[i + 3] == 65 and data[i + 4] == 84
