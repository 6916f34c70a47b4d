"""Where comments, strings and other literals end: the part of lexing that looks ahead. Kernels of lexer.py.

Each function gets the position after (or at) the start of a literal and returns the position after its end, or -1 if it
has none: the start is then punctuation. Each byte is read once, except in the nested strings of an f-string, which are
at most one line long.
"""

from __future__ import annotations

from typing import Any

from lakh.compiled import compiled

__all__ = [
    "end_of_block",
    "end_of_cpp_raw",
    "end_of_fstring",
    "end_of_line",
    "end_of_quote",
    "end_of_regex",
    "end_of_rust_raw",
    "end_of_template",
    "end_of_triple",
    "end_of_verbatim",
]


@compiled
def end_of_line(data: Any, i: int, end: int) -> int:
    while i < end and data[i] != 10:
        i += 1
    return i


@compiled
def end_of_quote(data: Any, i: int, end: int, quote: int, multiline: bool) -> int:
    """After the closing quote of a string that began before `i`; -1 if there is none."""
    while i < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if c == quote:
            return i + 1
        if c == 10 and not multiline:
            return -1
        i += 1
    return -1


@compiled
def end_of_triple(data: Any, i: int, end: int, quote: int) -> int:
    while i + 2 < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if c == quote and data[i + 1] == quote and data[i + 2] == quote:
            i += 3
            while i < end and data[i] == quote:  # \"\"\"say \"hi\"\"\"\" : the last three close
                i += 1
            return i
        i += 1
    return -1


@compiled
def end_of_verbatim(data: Any, i: int, end: int) -> int:
    """A string whose only escape is the doubled quote."""
    while i < end:
        if data[i] == 34:
            if i + 1 < end and data[i + 1] == 34:
                i += 1
            else:
                return i + 1
        i += 1
    return -1


@compiled
def end_of_fstring(data: Any, i: int, end: int, quote: int) -> int:
    """A one-line f-string; since Python 3.12 its braces may hold the same quotes again."""
    depth = 0
    while i < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if c == 10:
            return -1
        if c == 123:
            if depth == 0 and i + 1 < end and data[i + 1] == 123:
                i += 1
            else:
                depth += 1
        elif c == 125 and depth > 0:
            depth -= 1
        elif c == quote:
            if depth == 0:
                return i + 1
            j = end_of_quote(data, i + 1, end, quote, False)
            if j < 0:
                return i + 1
            # a nested string must be followed by the rest of an expression, up to a closing brace
            k = j
            while k < end and data[k] != 10 and data[k] != 125 and data[k] != quote:
                k += 1
            if k >= end or data[k] != 125:
                return i + 1
            i = j
            continue
        i += 1
    return -1


@compiled
def end_of_template(data: Any, i: int, end: int) -> int:
    """After the closing backtick; ${ } may hold strings, braces and further templates."""
    depth = 0  # open braces of a ${ }; 0 in the text of the template
    while i < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if depth == 0:
            if c == 96:
                return i + 1
            if c == 36 and i + 1 < end and data[i + 1] == 123:
                depth = 1
                i += 1
        elif c == 123:
            depth += 1
        elif c == 125:
            depth -= 1
        elif c == 96:
            j = end_of_template_text(data, i + 1, end)
            if j < 0:
                return -1
            i = j
            continue
        elif c == 34 or c == 39:
            j = end_of_quote(data, i + 1, end, c, False)
            if j > 0:
                i = j
                continue
        i += 1
    return -1


@compiled
def end_of_template_text(data: Any, i: int, end: int) -> int:
    """A template nested in another: braces are counted, quotes in them are ignored."""
    depth = 0
    while i < end:
        c = data[i]
        if c == 92:
            i += 2
            continue
        if c == 96 and depth == 0:
            return i + 1
        if c == 36 and i + 1 < end and data[i + 1] == 123:
            depth += 1
            i += 1
        elif c == 123 and depth > 0:
            depth += 1
        elif c == 125 and depth > 0:
            depth -= 1
        i += 1
    return -1


@compiled
def end_of_block(data: Any, i: int, end: int, nested: bool) -> int:
    depth = 1
    while i + 1 < end:
        if data[i] == 42 and data[i + 1] == 47:
            depth -= 1
            i += 2
            if depth == 0:
                return i
            continue
        if nested and data[i] == 47 and data[i + 1] == 42:
            depth += 1
            i += 2
            continue
        i += 1
    return -1


@compiled
def end_of_regex(data: Any, i: int, end: int) -> int:
    in_class = False
    while i < end:
        c = data[i]
        if c == 10:
            return -1
        if c == 92:
            i += 2
            continue
        if c == 91:
            in_class = True
        elif c == 93:
            in_class = False
        elif c == 47 and not in_class:
            i += 1
            while i < end and 97 <= data[i] <= 122:
                i += 1
            return i
        i += 1
    return -1


@compiled
def end_of_rust_raw(data: Any, i: int, end: int) -> int:
    """`i` is after the r of r"..." or r#"..."#; -1 if it is something else, e.g. the raw identifier r#type."""
    hashes = 0
    while i < end and data[i] == 35:
        hashes += 1
        i += 1
    if i >= end or data[i] != 34:
        return -1
    i += 1
    while i < end:
        if data[i] == 34:
            j = 0
            while j < hashes and i + 1 + j < end and data[i + 1 + j] == 35:
                j += 1
            if j == hashes:
                return i + 1 + hashes
        i += 1
    return -1


@compiled
def end_of_cpp_raw(data: Any, i: int, end: int) -> int:
    """`i` is at the quote of R"delimiter( ... )delimiter"."""
    j = i + 1
    while j < end and data[j] != 40 and j - i <= 17:
        if data[j] == 10 or data[j] == 34:
            return -1
        j += 1
    if j >= end or data[j] != 40:
        return -1
    size = j - i - 1
    k = j + 1
    while k + size + 1 < end:
        if data[k] == 41 and data[k + size + 1] == 34:
            same = True
            for m in range(size):
                if data[k + 1 + m] != data[i + 1 + m]:
                    same = False
                    break
            if same:
                return k + size + 2
        k += 1
    return -1
