"""Which parentheses are redundant: the precedence of operators around and inside them. Kernels of neighbours.py.

A pair of grouping parentheses is redundant if the loosest operator inside binds tighter than the operators on both
sides. Precedences are small integers; a `need` is twice the precedence of a neighbour, minus one where an equal
operator may stand unparenthesised on that side. Parentheses stay where `2 * inside > need` does not hold.

Four orders of operators cover the languages: Python and Rust (bit operators bind tighter than comparisons), Go (its
five levels), Swift, and C with those who follow it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import (
    BACKTICK_RAW,
    NESTED,
    PYTHON,
    RUST,
    SINGLE_STRING,
    TEMPLATE,
    TRAILING_ALL,
    TRIPLE,
    VERBATIM,
)
from lakh.corpus.parsing.word_table import word_table

__all__ = [
    "ATOM",
    "COALESCING",
    "COMMA",
    "GENERATOR",
    "INFIX",
    "KEEP",
    "KOTLIN",
    "OR",
    "SWIFT",
    "SWIFT_COALESCING",
    "operator_precedence",
    "word_precedences",
]

STATEMENT, YIELD, COMMA, GENERATOR, ASSIGNMENT, PHRASE, LAMBDA, TERNARY = 5, 7, 10, 11, 12, 13, 15, 16
COALESCING = 19  # a ?? b; looser than || in C# and Dart, and never beside it in JavaScript
OR, AND, NOT, COMPARISON, BIT_OR, BIT_XOR, BIT_AND = 20, 21, 22, 23, 24, 25, 26
C_BIT_OR, C_BIT_XOR, C_BIT_AND, C_EQUALITY, C_COMPARISON = 22, 23, 24, 25, 26  # looser than comparisons in C
SHIFT, SUM, PRODUCT, UNARY, POWER, AWAIT, ATOM = 27, 28, 29, 30, 31, 32, 50
INFIX = SHIFT
"""The functions of Kotlin that stand between their operands; no other word has this precedence."""
KOTLIN = NESTED | TRIPLE | TRAILING_ALL
"""Its flags, which no other language has."""
SWIFT = NESTED | TRIPLE
"""Its flags, which no other language has."""
SWIFT_COALESCING, SWIFT_RANGE, SWIFT_SUM, SWIFT_PRODUCT, SWIFT_SHIFT = 24, 25, 26, 27, 28
"""Bit operators bind as sums and products do in Swift, and a shift binds tighter."""
KEEP = 1000
"""The need of a neighbour beside which parentheses always stay: the name of a call, a cast's operand."""

# word: (need of the word on the left, need of the word on the right, precedence inside)
_PYTHON_WORDS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(
        ["return", "elif", "while", "assert", "del", "import", "with", "raise", "except", "from"],
        (2 * STATEMENT, KEEP, 0),
    ),
    "for": (2 * STATEMENT, 2 * COMMA, GENERATOR),
    "async": (2 * STATEMENT, 2 * COMMA, GENERATOR),
    "yield": (2 * STATEMENT, KEEP, YIELD),
    "as": (2 * STATEMENT, 2 * COMMA, COMMA),
    "in": (2 * COMPARISON, 2 * COMPARISON, COMPARISON),
    "is": (2 * COMPARISON, 2 * COMPARISON, COMPARISON),
    "not": (2 * NOT - 1, 2 * COMPARISON, NOT),
    "and": (2 * AND, 2 * AND - 1, AND),
    "or": (2 * OR, 2 * OR - 1, OR),
    "if": (2 * TERNARY, 2 * TERNARY, TERNARY),
    "else": (2 * LAMBDA - 1, 2 * TERNARY, TERNARY),
    "lambda": (KEEP, KEEP, LAMBDA),
    "await": (2 * AWAIT - 1, KEEP, AWAIT),
}
_C_WORDS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(["return", "throw", "case", "else", "do"], (2 * COMMA, 2 * COMMA, YIELD)),
    "instanceof": (2 * C_COMPARISON, 2 * C_COMPARISON - 1, C_COMPARISON),
    "new": (KEEP, KEEP, UNARY),
}
_JAVASCRIPT_WORDS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(["of", "default", "yield"], (2 * COMMA, 2 * COMMA, YIELD)),
    **dict.fromkeys(["typeof", "void", "delete", "await"], (2 * UNARY - 1, KEEP, UNARY)),
    "in": (2 * C_COMPARISON, 2 * C_COMPARISON - 1, C_COMPARISON),
    "as": (KEEP, 2 * PRODUCT, PRODUCT),
}
_GO_WORDS: dict[str, tuple[int, int, int]] = dict.fromkeys(
    ["return", "else", "if", "for", "switch", "case", "range"], (2 * COMMA, KEEP, YIELD)
)
"""Conditions need no parentheses in Go and Rust."""
_RUST_WORDS: dict[str, tuple[int, int, int]] = {
    "return": (2 * COMMA, KEEP, YIELD),
    **dict.fromkeys(["if", "for", "while", "match"], (2 * COMMA, KEEP, TERNARY)),
    "else": (2 * COMMA, 2 * COMMA, TERNARY),
    **{name: _JAVASCRIPT_WORDS[name] for name in ("in", "as")},
}

_SWIFT_WORDS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(["guard", "if", "in", "switch", "where", "while"], (2 * COMMA, KEEP, YIELD)),
}

_KOTLIN_WORDS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(
        ["and", "downTo", "or", "shl", "shr", "step", "to", "until", "ushr", "xor"], (2 * INFIX, 2 * INFIX - 1, INFIX)
    ),
    "in": _JAVASCRIPT_WORDS["in"],
    "is": (KEEP, 2 * C_COMPARISON - 1, C_COMPARISON),
    "as": _JAVASCRIPT_WORDS["as"],
    # no names: what follows them is no operand, and they are no infix functions
    **dict.fromkeys(
        [
            "catch",
            "class",
            "constructor",
            "finally",
            "for",
            "fun",
            "if",
            "interface",
            "object",
            "try",
            "typealias",
            "val",
            "var",
            "when",
            "while",
        ],
        (KEEP, KEEP, 0),
    ),
}
_TYPE_TEST_WORDS: dict[str, tuple[int, int, int]] = {name: _KOTLIN_WORDS[name] for name in ("as", "is")}


@lru_cache(maxsize=64)
def word_precedences(family: int, flags: int) -> tuple[np.ndarray, np.ndarray]:
    """A word table of the words that count as operators, with their needs (left, right) and precedence inside."""
    words = _C_WORDS
    if family == PYTHON:
        words = _PYTHON_WORDS
    elif flags & TEMPLATE:
        words = _C_WORDS | _JAVASCRIPT_WORDS
    elif flags & RUST:
        words = _RUST_WORDS
    elif flags & BACKTICK_RAW:
        words = _GO_WORDS
    elif flags == TRIPLE:  # Java, whose assert is no macro and whose yield is no name of a call
        words = _C_WORDS | dict.fromkeys(("assert", "yield"), _C_WORDS["return"])
    elif flags == KOTLIN:
        words = _C_WORDS | _KOTLIN_WORDS
    elif flags == SWIFT:
        words = _C_WORDS | _SWIFT_WORDS
    elif flags & VERBATIM or flags == TRIPLE | SINGLE_STRING | TRAILING_ALL:  # C# and Dart
        words = _C_WORDS | _TYPE_TEST_WORDS
    return word_table(words, 3)


@compiled
def _swift_precedence(a: Any, b: Any, beside: Any, before: Any) -> int:
    """The precedence of a binary operator of Swift that begins with `a`; `b` is its second character or 0."""
    if a == 61:
        return ASSIGNMENT if b == 0 and before != 61 else COMPARISON
    if a == 33:
        return COMPARISON if b == 61 else 0
    if a == 63:
        if beside == 46:
            return AWAIT  # a?.b
        return SWIFT_COALESCING if beside == 63 or before == 63 else TERNARY
    if a == 46:
        return SWIFT_RANGE if beside == 46 or before == 46 else 0
    if a == 60 or a == 62:
        if before == 46:
            return SWIFT_RANGE  # ..<
        return SWIFT_SHIFT if b == 0 and (beside == a or before == a) else COMPARISON
    if (a == 124 or a == 38) and b == a:
        return OR if a == 124 else AND
    if a == 38:
        if beside == 43 or beside == 45:
            return SWIFT_SUM  # &+
        return SWIFT_SHIFT if beside == 60 or beside == 62 else SWIFT_PRODUCT
    if a == 42 or a == 47 or a == 37:
        return SWIFT_PRODUCT
    if a == 43 or a == 45 or a == 94 or a == 124:
        return 0 if b == 62 else SWIFT_SUM
    return PHRASE if a == 58 and b == 0 else 0


@compiled
def operator_precedence(data: Any, start: int, end: int, stop: int, family: int, flags: int, unary: bool) -> int:
    """The precedence of the operator at `start`; 0 for punctuation that is none. `stop` is the end of the text."""
    a = data[start]
    b = data[start + 1] if end - start > 1 else np.uint8(0)
    beside = data[end] if end < stop else np.uint8(0)
    if a == 44:
        return COMMA
    if a == 58 and b == 61:
        return ASSIGNMENT
    if b == 61 and a != 61 and a != 33 and not ((a == 60 or a == 62) and data[start - 1] != a):
        return ASSIGNMENT
    if unary and (a == 43 or a == 45 or a == 126 or a == 33 or a == 42 or a == 38 or a == 94):
        return UNARY
    if flags == SWIFT:
        return _swift_precedence(a, b, beside, data[start - 1])
    tight = family == PYTHON or flags & RUST != 0  # bit operators bind tighter than comparisons
    go = family != PYTHON and flags & BACKTICK_RAW != 0
    if a == 61:
        if b == 61:
            return COMPARISON if tight or go else C_EQUALITY
        if b == 62:
            return ASSIGNMENT
        if data[start - 1] == 61:  # the third character of ===
            return C_EQUALITY
        return ASSIGNMENT
    if a == 33:
        return (COMPARISON if tight or go else C_EQUALITY) if b == 61 else 0
    if a == 63:
        if flags & RUST and family != PYTHON:
            return 0  # a?
        if beside == 46:
            return AWAIT  # a?.b
        return COALESCING if beside == 63 or data[start - 1] == 63 else TERNARY  # a ?? b
    if a == 60 or a == 62:
        if b == 0 and (beside == a or data[start - 1] == a):
            return PRODUCT if go else SHIFT
        return COMPARISON if tight or go else C_COMPARISON
    if a == 124:
        if b == 124:
            return OR
        return BIT_OR if tight else (SUM if go else C_BIT_OR)
    if a == 38:
        if b == 38:
            return AND
        return BIT_AND if tight else (PRODUCT if go else C_BIT_AND)
    if a == 94:
        return BIT_XOR if tight else (SUM if go else C_BIT_XOR)
    if a == 43 or a == 45:
        if b == 62 and family != PYTHON:
            return 0
        return UNARY if b == a else SUM
    if a == 42 or a == 47 or a == 37 or (a == 64 and family == PYTHON):
        if a == 42 and b == 0 and not go and (beside == 42 or data[start - 1] == 42):
            return POWER
        return PRODUCT
    if a == 46 and (beside == 46 or data[start - 1] == 46):
        return LAMBDA  # a range
    if a == 58:
        return 0 if family == PYTHON or b == 58 else PHRASE
    return 0
