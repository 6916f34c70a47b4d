"""Which tokens of a program mean nothing: redundant parentheses, trailing commas, the semicolons of JavaScript.

A pair of grouping parentheses is redundant if the loosest operator inside binds tighter than the operators on both
sides. One pass over the tokens with a stack of open brackets. Cost: linear, about 2 ns a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import (
    BACKTICK_RAW,
    LAYOUT,
    NESTED,
    NUMBER,
    PUNCTUATION,
    PYTHON,
    RUST,
    TEMPLATE,
    TRAILING_ALL,
    WORD,
    hash_of,
)
from lakh.corpus.parsing.normal_form.neighbours import (
    ANGLE,
    CALL_END,
    INFIX_NAME,
    ends_operand,
    is_infix_name,
    left_need,
    right_need,
    word_row,
)
from lakh.corpus.parsing.normal_form.precedence import (
    ATOM,
    GENERATOR,
    KEEP,
    KOTLIN,
    LAMBDA,
    OR,
    PHRASE,
    operator_precedence,
)
from lakh.corpus.parsing.word_table import row_of

__all__ = ["mark_redundant"]

MAX_DEPTH = 256  # brackets in deeper ones stay
MAX_PARTS = 8  # of a name a.b.c
MAX_TYPE_TOKENS = 128  # from the name of a generic call to its arguments
CLASS, FOR, IN, IMPORT, LAMBDA_WORD = (hash_of(word) for word in ("class", "for", "in", "import", "lambda"))


@compiled
def _mark_type_arguments(data: Any, count: int, kinds: Any, starts: Any, ends: Any, flags: int, marks: Any) -> None:
    """Mark the < and > of type arguments before a call, f<int>(x), which are no comparisons."""
    for t in range(3, count):
        if kinds[t] != PUNCTUATION or data[starts[t]] != 40:
            continue
        if kinds[t - 1] != PUNCTUATION or data[starts[t - 1]] != 62 or ends[t - 1] > starts[t - 1] + 1:
            continue
        k = _type_arguments_start(data, t - 1, kinds, starts, ends)
        if k < 1:
            continue
        before = data[starts[k - 1]]
        if flags & RUST:
            follows_name = before == 58  # Vec::<A>new
        else:
            follows_name = kinds[k - 1] == WORD or before == 46 or before == 93  # f<A>, List.<A>of, a[b]<A>
        if not follows_name:
            continue
        for j in range(k, t):
            c = data[starts[j]]
            if kinds[j] == PUNCTUATION and ends[j] == starts[j] + 1 and (c == 60 or c == 62):
                marks[j] = ANGLE


@compiled
def _type_arguments_start(data: Any, close: int, kinds: Any, starts: Any, ends: Any) -> int:
    """The < that the > at `close` ends; -1 if the tokens between them are no types."""
    open_angles = 1
    brackets = 0
    for k in range(close - 1, max(-1, close - MAX_TYPE_TOKENS), -1):
        if kinds[k] == LAYOUT:
            return -1
        if kinds[k] != PUNCTUATION:
            continue
        c = data[starts[k]]
        if c == 41 or c == 93 or c == 125:
            brackets += 1
        elif c == 40 or c == 91 or c == 123:
            brackets -= 1
            if brackets < 0:
                return -1
        elif ends[k] > starts[k] + 1:
            if c == 38 or c == 124:  # && ||
                return -1
        elif c == 60 or c == 62:
            open_angles += 1 if c == 62 else -1
            if open_angles == 0:
                return k if brackets == 0 else -1
        elif brackets == 0:
            if c == 63:  # int?
                after = data[starts[k + 1]]
                if after != 62 and after != 44:
                    return -1
            elif c == 59 or c == 43 or c == 45 or c == 47 or c == 37 or c == 33:  # ; + - / % !
                return -1
    return -1


@compiled
def _follows_name(data: Any, first: int, hashes: Any, kinds: Any, starts: Any, words: Any) -> bool:
    """Whether the parenthesis `first` of Kotlin follows the name of a function: not `if (`, not @A(."""
    p = first - 1
    if p < 0 or kinds[p] != WORD or row_of(words, hashes[p]) >= 0:
        return False
    for _ in range(MAX_PARTS):
        if p < 2 or kinds[p - 1] != PUNCTUATION or data[starts[p - 1]] not in (46, 58) or kinds[p - 2] != WORD:
            return p < 1 or data[starts[p - 1]] != 64
        p -= 2  # @a.b.C, @file:A
    return False


@compiled
def mark_redundant(data: Any, stop: int, count: int, hashes: Any, kinds: Any, starts: Any, ends: Any, family: int, flags: int, words: Any, rows: Any, drop: Any) -> None:  # fmt: skip  # noqa: E501
    """Set drop[t] to 1 for every token that the normal form leaves out."""
    for t in range(count):
        drop[t] = 0
    python = family == PYTHON
    if not python and not flags & BACKTICK_RAW:  # Go writes type arguments in square brackets
        _mark_type_arguments(data, count, kinds, starts, ends, flags, drop)
    opened = np.zeros(MAX_DEPTH + 1, np.int64)  # per bracket: its token
    byte = np.zeros(MAX_DEPTH + 1, np.uint8)
    need = np.zeros(MAX_DEPTH + 1, np.int64)  # of the token before it; KEEP for a bracket that does not group
    inside = np.zeros(MAX_DEPTH + 1, np.int64)  # the loosest operator directly in it
    commas = np.zeros(MAX_DEPTH + 1, np.int64)
    colons = np.zeros(MAX_DEPTH + 1, np.int64)  # since the last comma
    follows = np.zeros(MAX_DEPTH + 1, np.bool_)  # a call or a subscript
    awaits_in = np.zeros(MAX_DEPTH + 1, np.bool_)  # between `for` and its `in`
    in_lambda = np.zeros(MAX_DEPTH + 1, np.bool_)
    angles = np.zeros(MAX_DEPTH + 1, np.int64)  # open < of type arguments, whose commas separate no expressions
    need[0] = KEEP
    depth = 0
    beyond = 0  # brackets open beyond MAX_DEPTH
    is_for_in = False  # the last token is the `in` of a `for`
    for t in range(count):
        kind = kinds[t]
        if kind == LAYOUT:
            if python and commas[0] > 1 and depth == 0 and kinds[t - 1] == PUNCTUATION and data[starts[t - 1]] == 44:
                drop[t - 1] = 1  # return a, b,
            awaits_in[depth] = False
            is_for_in = False
            commas[0] = 0
            continue
        c = data[starts[t]]
        if kind == PUNCTUATION and (c == 40 or c == 91 or c == 123):
            if depth == MAX_DEPTH:
                beyond += 1
                continue
            subscript = byte[depth] == 91 and follows[depth]
            wanted = KEEP
            if c == 40:
                wanted = left_need(
                    data, stop, t, hashes, kinds, starts, ends, drop, family, flags, words, rows, depth, subscript,
                    is_for_in,
                )  # fmt: skip
            depth += 1
            opened[depth], byte[depth], need[depth], inside[depth], commas[depth] = t, c, wanted, ATOM, 0
            if c == 40:
                follows[depth] = wanted == KEEP or (python and t > 0 and hashes[t - 1] == IMPORT)
            else:
                follows[depth] = ends_operand(data, t - 1, hashes, kinds, starts, words, rows, drop)
            awaits_in[depth] = in_lambda[depth] = is_for_in = False
            angles[depth] = colons[depth] = 0
            continue
        if kind == PUNCTUATION and (c == 41 or c == 93 or c == 125):
            if beyond > 0:
                beyond -= 1
                continue
            if depth == 0:
                continue
            first = opened[depth]
            trailing = kinds[t - 1] == PUNCTUATION and data[starts[t - 1]] == 44 and t - 2 > first
            if trailing and kinds[t - 2] == PUNCTUATION and data[starts[t - 2]] == 44:
                trailing = False  # [1,,] of JavaScript
            if trailing and c == 125:
                drop[t - 1] = 1
            elif trailing and (python or flags & TRAILING_ALL):
                single = not follows[depth] if c == 41 else follows[depth]  # the tuple (x,), the subscript a[x,]
                if not single or commas[depth] > 1:
                    drop[t - 1] = 1
            if python and c == 93 and colons[depth] == 2 and data[starts[t - 1]] == 58 and follows[depth]:
                drop[t - 1] = 1  # a[b::]
            if python and t - 1 == first and t > 2 and hashes[t - 3] == CLASS:
                drop[first] = drop[t] = 1  # class A():
            is_group = c == 41 and byte[depth] == 40 and need[depth] != KEEP and t - 1 > first
            if (
                flags == KOTLIN
                and c == 41
                and not is_group
                and _follows_name(data, first, hashes, kinds, starts, words)
            ):
                drop[t] = CALL_END
            lowest, left = inside[depth], need[depth]
            depth -= 1
            if is_group:
                outer_first = depth > 0 and opened[depth] == first - 1
                closes = t + 1 < count and kinds[t + 1] == PUNCTUATION and data[starts[t + 1]] == 41
                if outer_first and closes and need[depth] != KEEP:
                    redundant = True  # ((x))
                elif lowest == GENERATOR:  # the only argument of a call, perhaps with a trailing comma
                    if not closes and t + 2 < count and data[starts[t + 1]] == 44:
                        closes = data[starts[t + 2]] == 41
                    redundant = outer_first and closes and byte[depth] == 40
                else:
                    subscript = byte[depth] == 91 and follows[depth]
                    right = right_need(
                        data, stop, t, count, hashes, kinds, starts, ends, family, flags, words, rows, depth,
                        subscript, awaits_in[depth], left >= 2 * OR or OR <= lowest < ATOM,
                    )  # fmt: skip
                    redundant = 2 * lowest > left and 2 * lowest > right
                    if t - 2 == first and kinds[t - 1] == NUMBER and right == 2 * ATOM - 1:
                        redundant = False  # (1).real
                if redundant:
                    drop[first] = drop[t] = 1
                    if not awaits_in[depth]:  # not the target of a `for`
                        inside[depth] = min(inside[depth], lowest)
            continue
        if kind == WORD and python:
            is_for_in = False
            if hashes[t] == FOR:
                awaits_in[depth] = True
            elif hashes[t] == IN and awaits_in[depth]:
                awaits_in[depth] = False
                is_for_in = True
        elif kind == PUNCTUATION:
            is_for_in = False
            if c == 44:
                commas[depth] += 1
                colons[depth] = 0
            elif c == 58:
                colons[depth] += 1
            elif c == 61 and depth == 0:
                commas[0] = 0
            elif c == 59 and flags & TEMPLATE and not python and byte[depth] != 40:
                drop[t] = 1
        if kind == WORD and flags == KOTLIN and t > 0:
            before = data[starts[t - 1]]
            may = kinds[t - 1] != PUNCTUATION or before == 41 or before == 93 or before == 125
            if may and is_infix_name(data, t, hashes, kinds, starts, ends, words, rows, drop):
                drop[t] = INFIX_NAME
        if need[depth] == KEEP:
            continue
        # the precedence of this token, directly inside grouping parentheses
        lowest = inside[depth]
        if kind == WORD:
            row = word_row(t, hashes, words, rows, drop)
            after_dot = kinds[t - 1] == PUNCTUATION and data[starts[t - 1]] == 46
            if row >= 0 and not after_dot:
                if rows[row, 2] > 0:
                    lowest = min(lowest, rows[row, 2])
                if python and hashes[t] == LAMBDA_WORD:
                    in_lambda[depth] = True
                    lowest = min(lowest, LAMBDA)
            elif not python:
                if kinds[t - 1] == WORD:
                    is_phrase = word_row(t - 1, hashes, words, rows, drop) < 0
                else:  # (a) b: an infix function, and in other languages a cast
                    before = data[starts[t - 1]]
                    is_phrase = flags & NESTED and kinds[t - 1] == PUNCTUATION and (before == 41 or before == 93)
                if is_phrase:
                    lowest = min(lowest, PHRASE)
        elif kind == PUNCTUATION:
            if c == 58 and in_lambda[depth]:
                in_lambda[depth] = False
            elif drop[t] == ANGLE:
                angles[depth] = max(angles[depth] + (c == 60) - (c == 62), 0)
            elif c != 44 or not (in_lambda[depth] or awaits_in[depth] or angles[depth] > 0):
                if not python and ends[t] == starts[t] + 1:
                    angles[depth] = max(angles[depth] + (c == 60) - (c == 62), 0)
                unary = not ends_operand(data, t - 1, hashes, kinds, starts, words, rows, drop)
                if unary and c == 42 and ends[t - 1] == starts[t] and data[starts[t - 1]] == 42:
                    unary = False  # the second character of **
                found = operator_precedence(data, starts[t], ends[t], stop, family, flags, unary)
                if found > 0:
                    lowest = min(lowest, found)
        inside[depth] = lowest
