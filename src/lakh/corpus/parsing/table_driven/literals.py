"""Where the literals of table-driven languages end. Kernels of lexer.py.

Each function returns the position after the literal, or -1 if it has no end (or is none): its first byte is then
punctuation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.literals import end_of_line
from lakh.corpus.parsing.table_driven.syntax import (
    BACKTICK,
    BRACE_DOLLAR,
    CHARACTER,
    DOLLAR_BRACE,
    DOLLAR_PAREN,
    DOUBLE,
    DOUBLED,
    ESCAPE,
    HASH_BRACE,
    MULTILINE,
    SINGLE,
    TICK_ESCAPE,
    TRANSPOSE,
)

__all__ = [
    "closing_of",
    "end_of_bar_braces",
    "end_of_character",
    "end_of_delimited",
    "end_of_dollar_quotes",
    "end_of_heredoc",
    "end_of_long_bracket",
    "end_of_perl_quotes",
    "end_of_r_raw",
    "end_of_raw_triple_quotes",
    "end_of_string",
    "end_of_triple_quotes",
    "heredoc_tag",
    "is_letter",
]

MAX_NESTING = 32
MAX_CHARACTER = 14
"""Bytes of a character literal, as '\\u{10FFFF}'."""


@compiled
def is_letter(c: Any) -> bool:
    return 97 <= (c | 32) <= 122 or c == 95


@compiled
def closing_of(c: int) -> int:
    """The closing delimiter of an opening one."""
    if c == 40:
        return 41
    if c == 91 or c == 123 or c == 60:
        return int(c) + 2
    return int(c)


@compiled
def end_of_string(data: Any, i: int, end: int, quote: int, rules: Any) -> int:
    """`i` is after the opening quote. Interpolations may hold strings and brackets."""
    stack = np.zeros(MAX_NESTING, np.int64)  # quotes and closing brackets that are awaited
    stack[0] = quote
    depth = 1
    while i < end:
        c = data[i]
        top = stack[depth - 1]
        if top == 34 or top == 39 or top == 96:
            mode = rules[DOUBLE if top == 34 else (SINGLE if top == 39 else BACKTICK)]
            if (c == 92 and mode & ESCAPE) or (c == 96 and mode & TICK_ESCAPE):
                i += 2
                continue
            if c == top:
                if mode & DOUBLED and i + 1 < end and data[i + 1] == top:
                    i += 2
                    continue
                depth -= 1
                if depth == 0:
                    return i + 1
            elif c == 10 and not mode & MULTILINE:
                return -1
            elif i + 1 < end and depth < MAX_NESTING:
                following = data[i + 1]
                if c == 123 and following == 36 and mode & BRACE_DOLLAR:
                    stack[depth] = 125
                    depth += 1
                elif following == 123 and ((c == 35 and mode & HASH_BRACE) or (c == 36 and mode & DOLLAR_BRACE)):
                    stack[depth] = 125
                    depth += 1
                    i += 1
                elif following == 40 and c == 36 and mode & DOLLAR_PAREN:
                    stack[depth] = 41
                    depth += 1
                    i += 1
        elif c == 92:
            i += 2
            continue
        elif c == top:
            depth -= 1
        elif depth < MAX_NESTING:
            if c == 34 or c == 96:
                if rules[DOUBLE if c == 34 else BACKTICK] > 0:
                    stack[depth] = c
                    depth += 1
            elif c == 39:
                if rules[SINGLE] > 0 and not rules[SINGLE] & (CHARACTER | TRANSPOSE) and top == 41:
                    stack[depth] = c
                    depth += 1
            elif closing_of(c) == top:
                stack[depth] = top
                depth += 1
        i += 1
    return -1


@compiled
def end_of_triple_quotes(data: Any, i: int, end: int, quote: int) -> int:
    while i + 2 < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if c == quote and data[i + 1] == quote and data[i + 2] == quote:
            return i + 3
        i += 1
    return -1


@compiled
def end_of_raw_triple_quotes(data: Any, i: int, end: int) -> int:
    """`i` is after three quotes of Scala; the last three quotes of a run end the string."""
    while i + 2 < end:
        if data[i] == 34 and data[i + 1] == 34 and data[i + 2] == 34:
            i += 3
            while i < end and data[i] == 34:
                i += 1
            return i
        i += 1
    return -1


@compiled
def end_of_character(data: Any, i: int, end: int) -> int:
    """`i` is after the quote of 'a' or '\\n'."""
    if i >= end or data[i] == 10 or data[i] == 39:
        return -1
    if data[i] == 92:
        for k in range(i + 2, min(end, i + MAX_CHARACTER)):
            if data[k] == 39:
                return k + 1
        return -1
    width = 1
    if data[i] >= 0xC0:
        width = 2 + (data[i] >= 0xE0) + (data[i] >= 0xF0)
    return i + width + 1 if i + width < end and data[i + width] == 39 else -1


@compiled
def end_of_delimited(data: Any, i: int, end: int, opening: int, one_line: bool, interpolates: bool) -> int:
    """`i` is after an opening delimiter; brackets nest, a backslash escapes, and #{} may hold the delimiter."""
    close = closing_of(opening)
    depth = 1
    while i < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if c == 10 and one_line:
            return -1
        if interpolates and c == 35 and i + 1 < end and data[i + 1] == 123:
            braces = 0
            i += 1
            while i < end:
                if data[i] == 123:
                    braces += 1
                elif data[i] == 125:
                    braces -= 1
                i += 1
                if braces == 0:
                    break
            continue
        if c == close:
            depth -= 1
            if depth == 0:
                return i + 1
        elif c == opening and close != opening:
            depth += 1
        i += 1
    return -1


@compiled
def end_of_perl_quotes(data: Any, i: int, end: int, word_size: int) -> int:
    """`i` is after q qq qw qx qr m s tr or y; -1 if no delimiter follows."""
    start = i
    parts = 1
    first = data[i - word_size]
    if first == 115 or first == 121 or first == 116:  # s y tr
        parts = 2
    k = i
    while k < end and (data[k] == 32 or data[k] == 9):
        k += 1
    if k >= end:
        return -1
    opening = data[k]
    if opening <= 32 or opening >= 128 or is_letter(opening) or 48 <= opening <= 57:
        return -1
    if opening in (61, 44, 59, 41) or (opening == 35 and k > start):  # = , ; ) and a comment
        return -1
    if k > start and closing_of(opening) == opening and opening != 47:
        return -1
    k = end_of_delimited(data, k + 1, end, opening, False, False)
    if k > 0 and parts == 2:
        if closing_of(opening) != opening:
            while k < end and data[k] <= 32:
                k += 1
            if k >= end:
                return -1
            k = end_of_delimited(data, k + 1, end, data[k], False, False)
        else:
            k = end_of_delimited(data, k, end, opening, False, False)
    while 0 < k < end and 97 <= data[k] <= 122 and first != 113:  # flags
        k += 1
    return k


@compiled
def end_of_long_bracket(data: Any, i: int, end: int) -> int:
    """`i` is at [[ or [=[; the end has as many equal signs."""
    k = i + 1
    while k < end and data[k] == 61:
        k += 1
    size = k - i - 1
    if k >= end or data[k] != 91:
        return -1
    k += 1
    while k + size + 1 < end:
        if data[k] == 93 and data[k + size + 1] == 93:
            same = True
            for m in range(size):
                same = same and data[k + 1 + m] == 61
            if same:
                return k + size + 2
        k += 1
    return -1


@compiled
def _end_at_tag(data: Any, k: int, end: int, tag: int, tag_end: int) -> int:
    """The position after the next copy of data[tag:tag_end]."""
    size = tag_end - tag
    while k + size <= end:
        same = True
        for m in range(size):
            if data[k + m] != data[tag + m]:
                same = False
                break
        if same:
            return k + size
        k += 1
    return -1


@compiled
def end_of_dollar_quotes(data: Any, i: int, end: int) -> int:
    """`i` is at $$ or $tag$."""
    k = i + 1
    while k < end and is_letter(data[k]):
        k += 1
    if k >= end or data[k] != 36:
        return -1
    return _end_at_tag(data, k + 1, end, i, k + 1)


@compiled
def end_of_bar_braces(data: Any, i: int, end: int) -> int:
    """`i` is at {| or {id|; the end is |} or |id}."""
    k = i + 1
    while k < end and 97 <= data[k] <= 122:
        k += 1
    if k >= end or data[k] != 124:
        return -1
    size = k - i - 1
    k += 1
    while k + size + 1 < end:
        if data[k] == 124 and data[k + size + 1] == 125:
            same = True
            for m in range(size):
                same = same and data[k + 1 + m] == data[i + 1 + m]
            if same:
                return k + size + 2
        k += 1
    return -1


@compiled
def end_of_r_raw(data: Any, i: int, end: int) -> int:
    """`i` is at the quote of r"(...)" or r"--[...]--"."""
    quote = data[i]
    k = i + 1
    while k < end and data[k] == 45:
        k += 1
    dashes = k - i - 1
    if k >= end or (data[k] != 40 and data[k] != 91 and data[k] != 123):
        return -1
    close = closing_of(data[k])
    k += 1
    while k + dashes + 1 < end:
        if data[k] == close and data[k + dashes + 1] == quote:
            same = True
            for m in range(dashes):
                same = same and data[k + 1 + m] == 45
            if same:
                return k + dashes + 2
        k += 1
    return -1


@compiled
def heredoc_tag(data: Any, i: int, end: int) -> Any:
    """`i` is after <<; (first byte of the tag, its end, end of the operator), or -1 as the first."""
    k = i
    if k < end and (data[k] == 45 or data[k] == 126):
        k += 1
    quote = np.uint8(0)
    if k < end and (data[k] == 34 or data[k] == 39 or data[k] == 92 or data[k] == 96):
        quote = data[k]
        k += 1
    begin = k
    if quote > 0 and quote != 92:  # any text, as 'END!'
        while k < end and data[k] != quote and data[k] != 10:
            k += 1
    while k < end and (is_letter(data[k]) or (k > begin and 48 <= data[k] <= 57)):
        k += 1
    if k == begin:
        return -1, -1, -1
    after = k
    if quote > 0 and quote != 92:
        if k >= end or data[k] != quote:
            return -1, -1, -1
        after = k + 1
    return begin, k, after


@compiled
def end_of_heredoc(data: Any, i: int, end: int, tag: int, tag_end: int, is_php: bool) -> int:
    """`i` is at the first line of a here-document that ends with the word data[tag:tag_end] on a line."""
    size = tag_end - tag
    while i < end:
        line_end = end_of_line(data, i, end)
        first = i
        while first < line_end and (data[first] == 32 or data[first] == 9):
            first += 1
        if first + size <= line_end:
            same = True
            for m in range(size):
                same = same and data[first + m] == data[tag + m]
            after = data[first + size] if first + size < line_end else np.uint8(10)
            if is_php:
                ends_here = not is_letter(after) and not 48 <= after <= 57
            else:
                ends_here = after == 10 or after == 13
            if same and ends_here:
                return first + size
        i = line_end + 1
    return -1
