"""Write strings by their value, so that two ways to write one give the same bytes. Kernels of writer.py.

Each writes to `out` from `size` on and returns the new size; none writes more than three bytes per byte of text, and
three more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.normal_form.numbers import hex_digit

__all__ = ["write_python_string", "write_quoted", "write_template"]

QUOTE = 34  # begins every string that is written by its value
BEGIN_FIELD, END_FIELD = 2, 4  # of an f-string


@compiled
def write_quoted(data: Any, begin: int, end: int, out: Any, size: int) -> int:
    """A string that may stand in single or double quotes: without them, and without backslashes before quotes."""
    out[size] = QUOTE
    size += 1
    i = begin + 1
    while i < end - 1:
        if data[i] == 92 and i + 1 < end - 1:
            if data[i + 1] != 34 and data[i + 1] != 39:
                out[size] = 92
                size += 1
            i += 1
        out[size] = data[i]
        size += 1
        i += 1
    return size


@compiled
def _is_blank(c: int) -> bool:
    return c == 32 or c == 9 or c == 10 or c == 13


@compiled
def _is_name(c: int) -> bool:
    return c >= 128 or 48 <= c <= 57 or 65 <= (c & 223) <= 90 or c == 95 or c == 36


@compiled
def write_template(data: Any, begin: int, end: int, out: Any, size: int) -> int:
    """A template string of JavaScript: in its ${} expressions, only blanks between two names stay."""
    depth = 0  # of braces in a ${}
    quote = np.uint8(0)  # of a string in a ${}
    i = begin
    while i < end:
        c = data[i]
        if c == 92 and i + 1 < end:
            out[size], out[size + 1] = c, data[i + 1]
            size += 2
            i += 2
            continue
        if depth == 0:
            if c == 36 and i + 1 < end and data[i + 1] == 123:
                depth = 1
                out[size], out[size + 1] = c, np.uint8(123)
                size += 2
                i += 2
                continue
        elif quote > 0:
            if c == quote:
                quote = np.uint8(0)
        elif _is_blank(c):
            before = out[size - 1]
            while i < end and _is_blank(data[i]):
                i += 1
            if i < end and _is_name(before) and _is_name(data[i]):
                out[size] = 32
                size += 1
            continue
        elif c == 34 or c == 39 or c == 96:
            quote = c
        elif c == 123 or c == 125:
            depth += 1 if c == 123 else -1
        out[size] = c
        size += 1
        i += 1
    return size


@compiled
def _is_trailing_comma(data: Any, close: int, begin: int, out: Any, size: int) -> bool:
    """Whether the comma that was written last is redundant before the bracket at `close` of an f-string's field."""
    if out[size - 1] != 44:
        return False
    depth = 0
    i = close
    while i > begin:
        c = data[i]
        if c == 41 or c == 93:
            depth += 1
        elif c == 40 or c == 91:
            depth -= 1
            if depth == 0:
                break
        i -= 1
    before = data[i - 1]
    is_call = _is_name(before) or before == 41 or before == 93
    return is_call if data[close] == 41 else not is_call  # the tuple (x,) and the subscript a[x,]


@compiled
def write_python_string(data: Any, begin: int, end: int, out: Any, size: int) -> int:
    """The value of a Python string literal; of an f-string, its expressions without blanks, quotes and parentheses."""
    raw = is_bytes = has_fields = False
    i = begin
    while data[i] != 34 and data[i] != 39:
        c = data[i] | 32
        raw = raw or c == 114
        is_bytes = is_bytes or c == 98
        has_fields = has_fields or c == 102 or c == 116
        i += 1
    quote = data[i]
    width = 3 if i + 5 < end and data[i + 1] == quote and data[i + 2] == quote else 1
    i += width
    last = end - width
    if is_bytes:
        out[size] = 98
        size += 1
    out[size] = QUOTE
    size += 1
    depth = 0  # of braces in a field
    field = size  # the start of its expression in `out`
    brackets = 0  # others, in its expression
    in_format = False  # after the colon of a field, where blanks count
    while i < last:
        c = data[i]
        if depth > 0:
            i += 1
            if c == 123:
                depth += 1
                in_format = False
            elif c == 125:
                depth -= 1
                was_format, in_format = in_format, depth > 0
                if depth == 0:
                    if out[size - 1] == 61 and size > field + 1 and not was_format:  # {x=} is x={x!r}
                        width_x = size - 1 - field
                        for k in range(width_x):  # the text, over the mark of the field
                            out[size + 1 + k] = out[field + k]
                        for k in range(width_x):
                            out[field - 1 + k] = out[size + 1 + k]
                        out[size - 2] = 61
                        out[size - 1] = BEGIN_FIELD
                        for k in range(width_x):
                            out[size + k] = out[size + 1 + k]
                        size += width_x
                        out[size] = 33
                        out[size + 1] = 114
                        size += 2
                    out[size] = END_FIELD
                    size += 1
                    continue
            elif (c == 91 or c == 40) and not in_format:
                brackets += 1
            elif (c == 93 or c == 41) and not in_format:
                brackets -= 1
                if _is_trailing_comma(data, i - 1, begin, out, size):
                    size -= 1
            elif c == 58 and depth == 1 and brackets == 0:
                in_format = True
            if c == 34 or c == 39 or c == 40 or c == 41 or (_is_blank(c) and not in_format):
                continue
            out[size] = c
            size += 1
            continue
        if has_fields and (c == 123 or c == 125):
            if i + 1 < last and data[i + 1] == c:
                i += 1
            elif c == 123:
                depth = 1
                in_format = False
                out[size] = BEGIN_FIELD
                size += 1
                field = size
                brackets = 0
                i += 1
                continue
        if c == 13 and i + 1 < last and data[i + 1] == 10:
            i += 1
            continue
        if c == 92 and not raw and i + 1 < last:
            i, size = _write_escape(data, i + 1, last, is_bytes, out, size)
            continue
        out[size] = c
        size += 1
        i += 1
    return size


@compiled
def _write_escape(data: Any, i: int, last: int, is_bytes: bool, out: Any, size: int) -> Any:
    """`i` is after a backslash; returns (the position after the escape, the new size)."""
    c = data[i]
    code = -1
    if c == 10:
        return i + 1, size
    if c == 13:
        return i + 1 + (i + 1 < last and data[i + 1] == 10), size
    if c == 92 or c == 39 or c == 34:
        code = int(c)
    elif c == 110:
        code = 10
    elif c == 116:
        code = 9
    elif c == 114:
        code = 13
    elif c == 97:
        code = 7
    elif c == 98:
        code = 8
    elif c == 102:
        code = 12
    elif c == 118:
        code = 11
    elif 48 <= c <= 55:
        code = 0
        j = i
        while j < last and j < i + 3 and 48 <= data[j] <= 55:
            code = code * 8 + int(data[j]) - 48
            j += 1
        i = j - 1
    elif c == 120 or ((c == 117 or c == 85) and not is_bytes):
        digits = 2 if c == 120 else (4 if c == 117 else 8)
        value = 0
        j = i + 1
        while j < last and j <= i + digits:
            digit = hex_digit(data[j])
            if digit < 0:
                break
            value = value * 16 + digit
            j += 1
        if j == i + digits + 1:
            code = value
            i = j - 1
    if code < 0:  # not an escape: the backslash is part of the string
        out[size] = 92
        out[size + 1] = c
        return i + 1, size + 2
    if is_bytes or code < 128:
        out[size] = code & 255
        size += 1
    elif code < 0x800:
        out[size] = 0xC0 | (code >> 6)
        out[size + 1] = 0x80 | (code & 63)
        size += 2
    elif code < 0x10000:
        out[size] = 0xE0 | (code >> 12)
        out[size + 1] = 0x80 | ((code >> 6) & 63)
        out[size + 2] = 0x80 | (code & 63)
        size += 3
    else:
        out[size] = 0xF0 | ((code >> 18) & 7)
        out[size + 1] = 0x80 | ((code >> 12) & 63)
        out[size + 2] = 0x80 | ((code >> 6) & 63)
        out[size + 3] = 0x80 | (code & 63)
        size += 4
    return i + 1, size
