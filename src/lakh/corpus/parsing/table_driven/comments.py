"""Where comments end, by the table of a language."""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.literals import end_of_line
from lakh.corpus.parsing.table_driven.literals import (
    end_of_long_bracket,
    is_letter,
)
from lakh.corpus.parsing.table_driven.syntax import (
    AFTER_BLANK,
    CLOSE,
    CLOSE_SIZE,
    DOLLAR_COMMENTS,
    FLAGS,
    HASH_IN_WORDS,
    KIND,
    LINE,
    LITERALS,
    LONG_BRACKET,
    NESTED,
    OPEN,
    OPEN_SIZE,
    PHP_TEXT,
    POD,
    PRAGMAS,
    SHELL_EXPANSION,
    SYMBOL_RUNS,
    WHOLE_LINES,
)

__all__ = ["end_of_comment"]


@compiled
def _starts_with(data: Any, i: int, end: int, row: Any, at: int, size: int) -> bool:
    if i + size > end:
        return False
    same = 0
    while same < size and data[i + same] == row[at + same]:
        same += 1
    return same == size


@compiled
def end_of_comment(data: Any, i: int, begin: int, end: int, rules: Any, classes: Any, comments: Any) -> int:
    """The position after the comment at `i`; 0 if there is none, -1 if it has no end."""
    flags, literals = rules[FLAGS], rules[LITERALS]
    for row in comments:
        size = row[OPEN_SIZE]
        if not _starts_with(data, i, end, row, OPEN, size):
            continue
        after = data[i + size] if i + size < end else np.uint8(0)
        before = data[i - 1] if i > begin else np.uint8(10)
        if row[KIND] == WHOLE_LINES:
            if i > begin and data[i - 1] != 10:
                continue
            if literals & POD and not is_letter(after):
                continue
            k = i
            while k < end:
                if _starts_with(data, k, end, row, CLOSE, row[CLOSE_SIZE]):
                    return end_of_line(data, k, end)
                k = end_of_line(data, k, end) + 1
            return end
        if row[KIND] == LINE:
            if i == begin and after == 33 and row[OPEN] == 35:
                return 0  # the interpreter's line
            if flags & HASH_IN_WORDS and (before == 36 or (before == 123 and i > begin + 1 and data[i - 2] == 36)):
                return 0
            if flags & AFTER_BLANK and not (
                before <= 32
                or before in (59, 40, 124, 38)  # ; ( | &
                or (before in (123, 125, 41, 96) and not literals & SHELL_EXPANSION)  # { } ) `, where no ${a}#b is
            ):
                return 0
            if flags & DOLLAR_COMMENTS and after == 36:
                return 0  # a directive
            if flags & PRAGMAS and after == 91 and size == 1:
                return 0  # an attribute
            if flags & SYMBOL_RUNS:  # -- begins a comment, --> is an operator
                k = i + size
                while k < end and data[k] == 45:
                    k += 1
                if (
                    k < end
                    and data[k] in (33, 35, 36, 37, 38, 42, 43, 46, 47, 60, 61, 62, 63, 64, 92, 94, 124, 126, 58)
                ) or (before in (33, 35, 36, 37, 38, 42, 43, 46, 47, 60, 61, 62, 63, 64, 92, 94, 124, 126, 58)):
                    return 0
            if literals & LONG_BRACKET and after == 91:
                k = end_of_long_bracket(data, i + size, end)
                if k > 0:
                    return k
            if literals & PHP_TEXT:
                k = i
                while k < end and data[k] != 10 and not (data[k] == 63 and k + 1 < end and data[k + 1] == 62):
                    k += 1
                return k
            return end_of_line(data, i, end)
        if flags & PRAGMAS and after == 35:  # {-# of Haskell
            return 0
        if row[OPEN] == 40 and after == 41:  # (*) is an operator
            return 0
        depth = 1
        k = i + size
        while k < end:
            if _starts_with(data, k, end, row, CLOSE, row[CLOSE_SIZE]):
                depth -= 1
                k += row[CLOSE_SIZE]
                if depth == 0:
                    return k
            elif row[KIND] == NESTED and _starts_with(data, k, end, row, OPEN, size):
                depth += 1
                k += size
            else:
                k += 1
        return -1
    return 0
