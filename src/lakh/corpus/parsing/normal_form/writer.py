"""Write the tokens of a program by their value; redundant_tokens.py has marked those to leave out.

    Python      `elif` as `else` and `if`; a suite on the line of its header, and statements after `;`, on own lines;
                adjacent strings as one; docstrings with every run of blanks as one
    C           adjacent strings as one

`out` needs 4 bytes per byte of text and 64 more, the arrays of tokens 2 entries per byte and 64 more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import (
    DEDENT,
    INDENT,
    LAYOUT,
    NEWLINE,
    NUMBER,
    PREPROCESSOR,
    PUNCTUATION,
    PYTHON,
    SINGLE_STRING,
    STRING,
    TEMPLATE,
    WORD,
    hash_bytes,
    hash_of,
)
from lakh.corpus.parsing.normal_form.numbers import write_lower, write_python_number
from lakh.corpus.parsing.normal_form.strings import write_python_string, write_quoted, write_template
from lakh.corpus.parsing.word_table import row_of, word_table

__all__ = ["write_normal_form"]

MAX_LEVELS = 256
SEPARATOR = 31
_LAYOUT_BYTES = np.array([0, 1, 2, 10], np.uint8)  # by hash of the LAYOUT token

ELIF, ELSE, IF, TRY, FINALLY, COLON = (hash_of(word) for word in ("elif", "else", "if", "try", "finally", ":"))
HEADER_WORDS = (
    "if", "elif", "else", "for", "while", "try", "except", "finally", "with", "def", "class", "async", "case",
)  # fmt: skip
HEADERS, _ = word_table(dict.fromkeys(HEADER_WORDS, ()), 0)


@compiled
def write_normal_form(data: Any, count: int, hashes: Any, kinds: Any, starts: Any, ends: Any, family: int, flags: int, drop: Any, out: Any, to_hashes: Any, to_kinds: Any, to_starts: Any) -> Any:  # fmt: skip  # noqa: E501
    """Write the tokens that are not dropped; return (bytes of `out`, tokens)."""
    python = family == PYTHON
    size = 0
    made = 0
    level = 0
    nested = np.zeros(MAX_LEVELS + 1, np.int64)  # per indentation: the `else: if` that stand for its `elif`
    fresh = True  # at the first token of a logical line
    only_strings = True
    line_begin = 0  # of the line in `out`
    depth = 0
    is_header = False
    line_start = 0
    open_suites = 0  # suites on the line of their header
    string_begin = -1  # in `out`, of the string that was written last
    for t in range(count):
        kind, h, start = kinds[t], hashes[t], starts[t]
        if drop[t] == 1:
            if python and kind == PUNCTUATION:
                c = data[start]
                depth += (c == 40) - (c == 41 and depth > 0)
            continue
        if kind == LAYOUT:
            string_begin = -1
            if python and h == NEWLINE and only_strings and not fresh:
                size = _collapse_blanks(out, line_begin, size)
                to_hashes[made - 1] = hash_bytes(out, line_begin, size - 1)
            if python and h == DEDENT:
                while nested[min(level, MAX_LEVELS)] > 0:
                    nested[min(level, MAX_LEVELS)] -= 1
                    size, made = _layout(DEDENT, start, out, size, to_hashes, to_kinds, to_starts, made)
                level = max(level - 1, 0)
            elif h == INDENT:
                level += 1
                nested[min(level, MAX_LEVELS)] = 0
            size, made = _layout(h, start, out, size, to_hashes, to_kinds, to_starts, made)
            if h == NEWLINE:
                while open_suites > 0:
                    open_suites -= 1
                    size, made = _layout(DEDENT, start, out, size, to_hashes, to_kinds, to_starts, made)
            fresh = True
            continue
        if python and fresh:
            if h != ELIF and h != ELSE:
                while nested[min(level, MAX_LEVELS)] > 0:
                    nested[min(level, MAX_LEVELS)] -= 1
                    size, made = _layout(DEDENT, start, out, size, to_hashes, to_kinds, to_starts, made)
            depth = 0
            line_start = t
            line_begin = size
            only_strings = True
            is_header = row_of(HEADERS, h) >= 0
            fresh = False
            if h == ELIF:
                size, made = _put(b"else", ELSE, WORD, start, out, size, to_hashes, to_kinds, to_starts, made)
                size, made = _put(b":", COLON, PUNCTUATION, start, out, size, to_hashes, to_kinds, to_starts, made)
                size, made = _layout(NEWLINE, start, out, size, to_hashes, to_kinds, to_starts, made)
                size, made = _layout(INDENT, start, out, size, to_hashes, to_kinds, to_starts, made)
                size, made = _put(b"if", IF, WORD, start, out, size, to_hashes, to_kinds, to_starts, made)
                nested[min(level, MAX_LEVELS)] += 1
                only_strings = False
                continue
        fresh = False
        if kind != STRING:
            only_strings = False
            string_begin = -1
        if python and kind == PUNCTUATION:
            c = data[start]
            if c == 40 or c == 91 or c == 123:
                depth += 1
            elif c == 41 or c == 93 or c == 125:
                depth = max(depth - 1, 0)
            elif c == 59 and depth == 0:
                if t + 1 < count and kinds[t + 1] != LAYOUT:
                    size, made = _layout(NEWLINE, start, out, size, to_hashes, to_kinds, to_starts, made)
                    line_begin = size
                continue
        begin = size
        if kind == STRING:
            quote = data[start]
            if python:
                if string_begin >= 0:  # adjacent strings are one
                    begin = string_begin
                    kept = size - 1
                    size = write_python_string(data, start, ends[t], out, size)
                    skipped = kept + 1
                    while out[skipped] != 34:
                        skipped += 1
                    skipped += 1
                    for k in range(skipped, size):
                        out[kept + k - skipped] = out[k]
                    size -= skipped - kept
                    made -= 1
                else:
                    size = write_python_string(data, start, ends[t], out, size)
                string_begin = begin
            elif flags & SINGLE_STRING and (quote == 34 or quote == 39):
                size = write_quoted(data, start, ends[t], out, size)
            elif quote == 96 and flags & TEMPLATE:
                size = write_template(data, start, ends[t], out, size)
            else:
                first = start
                if string_begin >= 0 and quote == 34:
                    begin = string_begin
                    size -= 2
                    made -= 1
                    first += 1
                for k in range(first, ends[t]):
                    out[size] = data[k]
                    size += 1
                string_begin = begin if quote == 34 and flags & PREPROCESSOR else -1
            h = hash_bytes(out, begin, size)
        elif kind == NUMBER:
            if python:
                size = write_python_number(data, start, ends[t], out, size)
            else:
                size = write_lower(data, start, ends[t], out, size)
            h = hash_bytes(out, begin, size)
        else:
            for k in range(start, ends[t]):
                out[size] = data[k]
                size += 1
        out[size] = SEPARATOR
        size += 1
        to_hashes[made], to_kinds[made], to_starts[made] = h, kind, start
        made += 1
        if python and is_header and depth == 0 and h == COLON and t + 1 < count and kinds[t + 1] != LAYOUT:
            # a suite on the line of its header; `case: int` is an annotation
            word = hashes[line_start]
            if t > line_start + 1 or word in (ELSE, TRY, FINALLY):
                size, made = _layout(NEWLINE, start, out, size, to_hashes, to_kinds, to_starts, made)
                size, made = _layout(INDENT, start, out, size, to_hashes, to_kinds, to_starts, made)
                open_suites += 1
                is_header = False
                only_strings = True
                line_begin = size
    return size, made


@compiled
def _layout(h: int, start: int, out: Any, size: int, hashes: Any, kinds: Any, starts: Any, made: int) -> Any:
    out[size] = _LAYOUT_BYTES[h]
    hashes[made], kinds[made], starts[made] = h, LAYOUT, start
    return size + 1, made + 1


@compiled
def _put(text: bytes, h: int, kind: int, start: int, out: Any, size: int, hashes: Any, kinds: Any, starts: Any, made: int) -> Any:  # fmt: skip  # noqa: E501
    for c in text:
        out[size] = c
        size += 1
    out[size] = SEPARATOR
    hashes[made], kinds[made], starts[made] = h, kind, start
    return size + 1, made + 1


@compiled
def _collapse_blanks(out: Any, begin: int, size: int) -> int:
    """A docstring from `begin` to its separator: each run of blanks becomes one, those at both ends none."""
    to = begin + 1  # after its quote
    blank = False
    for k in range(begin + 1, size - 1):
        c = out[k]
        if c == 32 or c == 9 or c == 10 or c == 13:
            blank = to > begin + 1
            continue
        if blank:
            out[to] = 32
            to += 1
            blank = False
        out[to] = c
        to += 1
    out[to] = SEPARATOR
    return to + 1
