"""The tokens beside a pair of parentheses: how tightly the operator on each side binds. Kernels of redundant_tokens.py.

A `need` is twice the precedence of the operator, minus one where an equal operator may stand without parentheses on
that side (precedence.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import (
    BACKTICK_RAW,
    LAYOUT,
    NESTED,
    PUNCTUATION,
    PYTHON,
    RUST,
    TEMPLATE,
    VERBATIM,
    WORD,
    hash_of,
)
from lakh.corpus.parsing.normal_form.precedence import (
    ASSIGNMENT,
    ATOM,
    COALESCING,
    COMMA,
    COMPARISON,
    INFIX,
    KEEP,
    KOTLIN,
    POWER,
    STATEMENT,
    SWIFT,
    SWIFT_COALESCING,
    TERNARY,
    UNARY,
    operator_precedence,
)
from lakh.corpus.parsing.word_table import row_of

__all__ = ["ANGLE", "CALL_END", "INFIX_NAME", "ends_operand", "is_infix_name", "left_need", "right_need", "word_row"]

ANGLE, CALL_END, INFIX_NAME = 2, 3, 4
"""Marks of the < and > around type arguments, as in f<int>(x), and in Kotlin of the ) of a call and of the name of an
infix function; redundant tokens have the mark 1."""

IF, IN, UNTIL = (hash_of(word) for word in ("if", "in", "until"))
MAX_NAMES = 8  # in a row; keeps every text linear


@compiled
def word_row(t: int, hashes: Any, words: Any, rows: Any, marks: Any) -> Any:
    """The row of the word `t`, or -1. Kotlin has infix functions, which have the mark INFIX_NAME."""
    row = row_of(words, hashes[t])
    if row >= 0 and rows[row, 2] != INFIX:
        return row
    return row_of(words, UNTIL) if marks[t] == INFIX_NAME else -1


@compiled
def is_infix_name(data: Any, t: int, hashes: Any, kinds: Any, starts: Any, ends: Any, words: Any, rows: Any, marks: Any) -> bool:  # fmt: skip  # noqa: E501
    """Whether the name `t` of Kotlin stands between two operands on a line. The marks of the tokens before are set."""
    row = row_of(words, hashes[t])
    if row >= 0 and rows[row, 2] != INFIX:
        return False
    first = t  # of the names in a row: a b c d is a.b(c).d()
    while first > 0 and kinds[first - 1] == WORD and not _breaks_line(data, first - 1, starts, ends):
        before = row_of(words, hashes[first - 1])
        if before >= 0 and rows[before, 2] != INFIX:
            break
        first -= 1
        if t - first > MAX_NAMES:
            return False
    follows_operand = False
    if first > 0 and not _breaks_line(data, first - 1, starts, ends):
        c = data[starts[first - 1]]
        if kinds[first - 1] == PUNCTUATION:
            # ) may end the head of an `if`, unless it ends a redundant group or a call
            is_known = row >= 0 or marks[first - 1] == 1 or marks[first - 1] == CALL_END
            follows_operand = c == 93 or (c == 41 and is_known) or (c == 125 and row >= 0)
        else:
            follows_operand = kinds[first - 1] != WORD
    return ((t - first) % 2 == 1) != follows_operand


@compiled
def _breaks_line(data: Any, t: int, starts: Any, ends: Any) -> bool:
    """Whether a line ends between token `t` and the next one."""
    k = ends[t]
    while k < starts[t + 1] and data[k] != 10:
        k += 1
    return bool(k < starts[t + 1])


@compiled
def ends_operand(data: Any, t: int, hashes: Any, kinds: Any, starts: Any, words: Any, rows: Any, marks: Any) -> bool:
    """Whether an operator after token `t` is binary."""
    if t < 0 or kinds[t] == LAYOUT:
        return False
    if kinds[t] == WORD:
        return word_row(t, hashes, words, rows, marks) < 0
    if kinds[t] == PUNCTUATION:
        c = data[starts[t]]
        return c == 41 or c == 93 or c == 125 or (c == 62 and marks[t] == ANGLE)
    return True


@compiled
def left_need(data: Any, stop: int, t: int, hashes: Any, kinds: Any, starts: Any, ends: Any, marks: Any, family: int, flags: int, words: Any, rows: Any, depth: int, in_subscript: bool, is_for_in: bool) -> int:  # fmt: skip  # noqa: E501
    """The need of the token before the parenthesis `t`; KEEP if it makes the parenthesis a call or a cast."""
    p = t - 1
    python = family == PYTHON
    statement = 2 * STATEMENT if python else 2 * COMMA
    if p < 0 or kinds[p] == LAYOUT:
        return statement
    begins_line = flags == KOTLIN and _breaks_line(data, p, starts, ends)
    if begins_line and ends_operand(data, p, hashes, kinds, starts, words, rows, marks):
        return statement  # arguments never begin a line
    if kinds[p] == WORD:
        row = word_row(p, hashes, words, rows, marks)
        if row < 0:
            return KEEP
        if p > 0 and kinds[p - 1] == PUNCTUATION and data[starts[p - 1]] == 46:
            return KEEP  # a.return(x)
        if python and hashes[p] == IF and (p == 0 or kinds[p - 1] == LAYOUT):
            return statement
        if python and is_for_in:
            return statement if depth == 0 else 2 * TERNARY
        return rows[row, 0]
    if kinds[p] != PUNCTUATION:
        return KEEP
    c = data[starts[p]]
    if c == 125 and flags & RUST and not python and data[starts[p - 1]] == 59:
        return statement  # a block that ends with ; has no value that could be called
    if c == 41 or c == 93 or c == 125 or marks[p] == ANGLE:
        return KEEP
    if c == 63 and data[starts[p] - 1] == 63:  # a ?? (b)
        if flags == SWIFT:
            return 2 * SWIFT_COALESCING - 1
        return 2 * COALESCING - (flags & VERBATIM != 0)  # right to left in C#
    if c == 40 or c == 123 or c == 44 or c == 63:
        return 2 * COMMA
    if c == 91:
        return 2 * STATEMENT if python and in_subscript else 2 * COMMA
    if c == 59:
        return statement
    size = ends[p] - starts[p]
    if c == 58 and size == 1:
        return 2 * COMMA if python else 2 * TERNARY - 1
    if size == 2 and data[starts[p] + 1] == 62:  # -> and =>
        opens_object = t + 1 < len(kinds) and data[starts[t + 1]] == 123
        return KEEP if opens_object else 2 * ASSIGNMENT - 1
    binary = ends_operand(data, p - 1, hashes, kinds, starts, words, rows, marks)
    if c == 42 and p > 0 and kinds[p - 1] == PUNCTUATION and data[starts[p - 1]] == 42 and ends[p - 1] == starts[p]:
        if ends_operand(data, p - 2, hashes, kinds, starts, words, rows, marks):
            return 2 * UNARY - 1  # a ** (-b)
        return 2 * COMMA
    if python and c == 42 and not binary:
        return 2 * COMMA
    found = operator_precedence(data, starts[p], ends[p], stop, family, flags, not binary)
    if found == 0:
        return KEEP
    if found == ASSIGNMENT:
        if python:
            return statement if depth == 0 else 2 * COMMA
        return 2 * ASSIGNMENT - 1
    return 2 * found - 1 if found == UNARY else 2 * found


@compiled
def _begins_statement(data: Any, t: int, starts: Any, ends: Any, flags: int) -> bool:
    """Whether the token after `t` begins a statement because it is on a new line, without a semicolon."""
    if flags & (TEMPLATE | BACKTICK_RAW) or (flags & NESTED and not flags & RUST):
        return _breaks_line(data, t, starts, ends)
    return False


@compiled
def right_need(data: Any, stop: int, t: int, count: int, hashes: Any, kinds: Any, starts: Any, ends: Any, family: int, flags: int, words: Any, rows: Any, depth: int, in_subscript: bool, awaits_in: bool, is_condition: bool) -> int:  # fmt: skip  # noqa: E501
    """The need of the token after the closing parenthesis `t`."""
    n = t + 1
    python = family == PYTHON
    statement = 2 * STATEMENT if python else 2 * COMMA
    if n >= count or kinds[n] == LAYOUT:
        return statement
    if kinds[n] != PUNCTUATION:
        row = row_of(words, hashes[n]) if kinds[n] == WORD else -1
        if python:
            if row >= 0 and hashes[n] == IN and awaits_in:
                return statement
            return rows[row, 1] if row >= 0 else KEEP
        if row >= 0 and rows[row, 1] != KEEP and not (rows[row, 2] == INFIX and _breaks_line(data, t, starts, ends)):
            return rows[row, 1]
        if _begins_statement(data, t, starts, ends, flags):
            return 2 * COMMA
        return 2 * INFIX - 1 if flags == KOTLIN and kinds[n] == WORD and row < 0 else KEEP
    c = data[starts[n]]
    size = ends[n] - starts[n]
    second = data[starts[n] + 1] if starts[n] + 1 < stop else np.uint8(0)
    if c == 44 or c == 41 or c == 125 or c == 123:
        return 2 * COMMA
    if c == 93:
        return 2 * STATEMENT if python and in_subscript else 2 * COMMA
    if c == 59:
        return statement
    if c == 40 or c == 91 or (c == 46 and second != 46) or (c == 63 and second == 46):
        return 2 * ATOM - 1
    if c == 126 or (c == 33 and second != 61) or ((c == 64 or c == 35) and not python):
        # ~a, !a, @A or #if of the next statement; a! of TypeScript
        if _begins_statement(data, t, starts, ends, flags):
            return 2 * COMMA
        return 2 * ATOM - 1 if c == 33 else KEEP
    if c == 63 and flags & RUST:
        return 2 * ATOM - 1
    if c == 61 and second == 62 and flags & RUST:
        return 2 * COMMA  # the guard of a match
    if flags == KOTLIN and c == 45 and second == 62:
        return 2 * COMMA if is_condition else KEEP  # when { a > (b) -> c }, and { (a) -> b }, which takes a apart
    if size == 2 and (second == 62 or (c == second and (c == 43 or c == 45 or c == 58))):  # => -> ++ -- ::
        return 2 * ATOM - 1
    if c == 58 and size == 1:
        return statement if python and depth == 0 else 2 * COMMA
    found = operator_precedence(data, starts[n], ends[n], stop, family, flags, False)
    if found == 0:
        return KEEP
    if found == ASSIGNMENT and python:
        return statement if depth == 0 else 2 * COMMA
    if found in (POWER, TERNARY, ASSIGNMENT) or (found == COMPARISON and python):
        return 2 * found
    if (found == SWIFT_COALESCING and flags == SWIFT) or (found == COALESCING and flags & VERBATIM):
        return 2 * found
    return 2 * found - 1
