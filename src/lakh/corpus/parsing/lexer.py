"""One pass over a text: its syntax tokens without comments and layout, and their hashes.

Compiled with numba at first use and cached beside the package. A lexer is enough here, and twenty times faster than a
parser: to strip comments and layout it only needs to know where strings, comments and (in Python) logical lines begin
and end. `languages.py` has the flags of each language.

    family PYTHON   indentation, logical lines and brackets are tokens; comments and line breaks in brackets are not
    family CLIKE    whitespace and line breaks disappear, except at the end of a preprocessor line

Languages of the family TABLE have a lexer that is driven by a table (table_driven/).

Two texts have the same tokens if they differ only in comments and layout; normal_form/ removes what else a formatter
may change. Ambiguities are resolved towards *keeping* text: a quote without an end is punctuation, a JavaScript regular
expression after a closing bracket is read as a division.

`lex` is one long function because numba does not inline its parts: six helpers made it 18 % slower.

Cost: linear in any text, about 5-10 ns a byte. Accepts any bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.literals import (
    end_of_block,
    end_of_cpp_raw,
    end_of_fstring,
    end_of_line,
    end_of_quote,
    end_of_regex,
    end_of_rust_raw,
    end_of_template,
    end_of_triple,
    end_of_verbatim,
)

__all__ = ["hash_bytes", "hash_of", "lex"]

PYTHON, CLIKE, TABLE = 0, 1, 2

NESTED = 1  # /* /* */ */
PREPROCESSOR = 2
BACKTICK_RAW = 4  # Go
TEMPLATE = 8  # `${}` of JavaScript
REGEX = 16
TRIPLE = 32  # three quotes
RUST = 64  # lifetimes, r#""#, strings over several lines
RAW_CPP = 128
SINGLE_STRING = 256  # '...' is a string, with any number of characters
TRAILING_ALL = 1024  # a trailing comma is optional before ) and ] too, not only before }
DIGIT_QUOTE = 2048  # 1'000
VERBATIM = 4096  # @"..." of C#, where only "" is an escape

WORD, NUMBER, STRING, PUNCTUATION, LAYOUT = 0, 1, 2, 3, 4

MAX_INDENTS = 256  # deeper nesting shares the last level
LONG_LINE = 4096
MAX_UNCLOSED = 16  # after that their beginnings are punctuation, so that every text takes linear time
INDENT, DEDENT, NEWLINE = 1, 2, 3  # hashes of LAYOUT tokens

# Bytes by class: 0 other, 1 blank, 2 identifier start, 3 digit, 4 line end
_CLASS = np.zeros(256, np.uint8)
for _byte in b" \t\f\v\r":
    _CLASS[_byte] = 1
_CLASS[10] = 4
for _byte in range(256):
    if (chr(_byte).isalpha() and _byte < 128) or _byte in b"_$" or _byte >= 128:
        _CLASS[_byte] = 2
    elif 48 <= _byte <= 57:
        _CLASS[_byte] = 3


@compiled
def hash_bytes(data: Any, begin: int, end: int) -> Any:
    # Unsigned, since LLVM assumes that signed products do not overflow: a comparison of two hashes was then wrong.
    h = np.uint64(0xCBF29CE484222325)
    for i in range(begin, end):
        h = (h ^ np.uint64(data[i])) * np.uint64(1099511628211)
    h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(h ^ (h >> np.uint64(32)))


def hash_of(word: str) -> int:
    """The hash of a token: `hash_bytes` in Python, so that constants of modules load no compiled code."""
    most, h = (1 << 64) - 1, 0xCBF29CE484222325
    for byte in word.encode():
        h = (h ^ byte) * 1099511628211 & most
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9 & most
    h ^= h >> 32
    return h - (1 << 64) if h >> 63 else h


@compiled
def _operator_size(data: Any, i: int, end: int, python: bool) -> int:
    if i + 1 >= end:
        return 1
    a, b = data[i], data[i + 1]
    if b == 61 and (
        a == 61 or a == 33 or a == 60 or a == 62 or a == 43 or a == 45 or a == 42 or a == 47 or a == 37
        or a == 38 or a == 124 or a == 94 or a == 58
    ):  # fmt: skip
        return 2
    if a == b and (a == 43 or a == 45 or a == 38 or a == 124 or (a == 58 and not python) or (a == 47 and python)):
        return 2
    if b == 62 and (a == 45 or a == 61):
        return 2
    return 1


@compiled
def _is_string_prefix(data: Any, begin: int, end: int) -> bool:
    """r b u f and their pairs, as Python has them."""
    if end - begin > 2:
        return False
    for i in range(begin, end):
        c = data[i] | 32
        if c != 114 and c != 98 and c != 117 and c != 102 and c != 116:
            return False
    return True


@compiled
def _may_precede_fraction(c: int) -> bool:
    """Whether .5 after this byte is a number, not a field or a range."""
    return _CLASS[c] & 2 == 0 and c != 41 and c != 93 and c != 46


@compiled
def lex(data: Any, begin: int, end: int, family: int, flags: int, regex_words: Any, hashes: Any, kinds: Any, starts: Any, ends: Any, stats: Any) -> Any:  # fmt: skip  # noqa: E501
    """Fill per token its hash, kind, first byte and end; return the number of tokens.

    The token arrays need 2 * (end - begin) + 64 entries. `stats` (4 entries) gets the bytes of comments, strings,
    numbers and of all tokens.
    """
    count = 0
    i = begin
    depth = 0
    line_tokens = 0
    indents = np.zeros(MAX_INDENTS, np.int64)
    indent_level = 0
    line_start = True
    in_directive = False
    last_kind = -1
    last_byte = 0
    last_hash = np.int64(0)
    unclosed = 0  # comments and strings without an end: each costs a scan of the rest of the text
    for k in range(4):
        stats[k] = 0
    while i < end:
        c = data[i]
        kind = _CLASS[c]
        # --- line starts -----------------------------------------------------------------------------------------
        if line_start:
            line_start = False
            if family == PYTHON and depth == 0:
                column = 0
                j = i
                while j < end and (data[j] == 32 or data[j] == 9 or data[j] == 12):
                    if data[j] == 9:
                        column = (column // 8 + 1) * 8
                    elif data[j] == 12:
                        column = 0
                    else:
                        column += 1
                    j += 1
                if j >= end or data[j] == 10 or data[j] == 35 or data[j] == 13:
                    i = j
                    if i < end and data[i] == 35:
                        i = end_of_line(data, i, end)
                        stats[0] += i - j
                    if i < end:
                        i += 1
                        line_start = True
                    continue
                if column > indents[indent_level]:
                    if indent_level < MAX_INDENTS - 1:
                        indent_level += 1
                        indents[indent_level] = column
                        hashes[count], kinds[count], starts[count], ends[count] = INDENT, LAYOUT, i, i
                        count += 1
                else:
                    while indent_level > 0 and column < indents[indent_level]:
                        indent_level -= 1
                        hashes[count], kinds[count], starts[count], ends[count] = DEDENT, LAYOUT, i, i
                        count += 1
                i = j
                continue
        # --- blanks and line ends --------------------------------------------------------------------------------
        if kind == 1:
            i += 1
            continue
        if kind == 4:
            i += 1
            line_start = True
            if (family == PYTHON and depth == 0) or in_directive:
                if line_tokens > 0:
                    hashes[count], kinds[count], starts[count], ends[count] = NEWLINE, LAYOUT, i - 1, i - 1
                    count += 1
                    last_kind = LAYOUT
                    last_byte = 10
                line_tokens = 0
                in_directive = False
            continue
        token_end = i + 1
        token_kind = PUNCTUATION
        k = 0  # end of the literal that begins here; 0 without a literal, -1 if it has no end
        # --- words and numbers -----------------------------------------------------------------------------------
        if kind == 2:
            j = i + 1
            while j < end and (_CLASS[data[j]] == 2 or _CLASS[data[j]] == 3):
                j += 1
            token_end, token_kind = j, WORD
            if unclosed >= MAX_UNCLOSED:
                pass
            elif family == PYTHON and j < end and (data[j] == 34 or data[j] == 39) and _is_string_prefix(data, i, j):
                quote = data[j]
                if j + 2 < end and data[j + 1] == quote and data[j + 2] == quote:
                    k = end_of_triple(data, j + 3, end, quote)
                elif data[i] | 32 == 102 or data[j - 1] | 32 == 102 or data[i] | 32 == 116:
                    k = end_of_fstring(data, j + 1, end, quote)
                else:
                    k = end_of_quote(data, j + 1, end, quote, False)
            elif family == CLIKE and flags & RUST and j < end and j - i <= 2 and data[j - 1] == 114:
                k = end_of_rust_raw(data, j, end)
                if k < 0 and data[j] != 34 and data[j] != 35:
                    k = 0
            elif family == CLIKE and flags & RAW_CPP and j < end and data[j] == 34 and data[j - 1] == 82 and j - i <= 3:
                k = end_of_cpp_raw(data, j, end)
        elif kind == 3 or (
            c == 46  # .5
            and i + 1 < end
            and _CLASS[data[i + 1]] == 3
            and (i == begin or _may_precede_fraction(data[i - 1]))
        ):
            j = i + 1
            is_hex = c == 48 and j < end and (data[j] | 32) == 120
            while j < end and (
                _CLASS[data[j]] == 2
                or _CLASS[data[j]] == 3
                or (data[j] == 46 and j + 1 < end and _CLASS[data[j + 1]] == 3)
                or (
                    data[j] == 39
                    and flags & DIGIT_QUOTE
                    and family == CLIKE
                    and j + 1 < end
                    and _CLASS[data[j + 1]] >= 2
                    and data[j + 1] < 128
                )
                or (
                    (data[j] == 43 or data[j] == 45)  # 1e-5
                    and (data[j - 1] | 32) == 101
                    and not is_hex
                    and j + 1 < end
                    and _CLASS[data[j + 1]] == 3
                )
            ):
                j += 1
            if (
                j < end  # 1.
                and data[j] == 46
                and family == PYTHON
                and (j + 1 == end or (_CLASS[data[j + 1]] & 2 == 0 and data[j + 1] != 46))
            ):
                j += 1
            token_end, token_kind = j, NUMBER
        # --- comments, strings, operators ------------------------------------------------------------------------
        elif family == PYTHON:
            if c == 35:
                j = end_of_line(data, i, end)
                stats[0] += j - i
                i = j
                continue
            if c == 92 and i + 1 < end and (data[i + 1] == 10 or (data[i + 1] == 13)):
                i += 2
                if i < end and data[i - 1] == 13 and data[i] == 10:
                    i += 1
                continue
            if (c == 34 or c == 39) and unclosed < MAX_UNCLOSED:
                if i + 2 < end and data[i + 1] == c and data[i + 2] == c:
                    k = end_of_triple(data, i + 3, end, c)
                else:
                    k = end_of_quote(data, i + 1, end, c, False)
            else:
                token_end = i + _operator_size(data, i, end, True)
        else:
            if c == 47 and i + 1 < end and data[i + 1] == 47:
                j = end_of_line(data, i, end)
                while j < end and j > i and (data[j - 1] == 92) and flags & PREPROCESSOR:
                    j = end_of_line(data, j + 1, end)
                stats[0] += j - i
                i = j
                continue
            if unclosed >= MAX_UNCLOSED and c != 92 and c != 35:
                pass
            elif c == 47 and i + 1 < end and data[i + 1] == 42:
                j = end_of_block(data, i + 2, end, flags & NESTED != 0)
                if j > 0:
                    stats[0] += j - i
                    i = j
                    continue
                k = -1
            elif c == 34:
                k = -1
                if (
                    flags & VERBATIM
                    and i > begin
                    and (data[i - 1] == 64 or (data[i - 1] == 36 and i > begin + 1 and data[i - 2] == 64))
                ):
                    k = end_of_verbatim(data, i + 1, end)
                elif flags & TRIPLE and i + 2 < end and data[i + 1] == 34 and data[i + 2] == 34:
                    k = end_of_triple(data, i + 3, end, 34)
                if k < 0:
                    k = end_of_quote(data, i + 1, end, 34, flags & RUST != 0)
            elif c == 39 and flags & RUST:  # a character; otherwise a lifetime
                if i + 1 < end and data[i + 1] == 92:
                    k = max(0, end_of_quote(data, i + 1, end, 39, False))
                else:
                    width = 1
                    if i + 1 < end and data[i + 1] >= 0xC0:
                        width = 2 + (data[i + 1] >= 0xE0) + (data[i + 1] >= 0xF0)
                    if i + 1 + width < end and data[i + 1 + width] == 39:
                        k = i + 2 + width
            elif c == 39:
                k = end_of_quote(data, i + 1, end, 39, False)
                if k > i + 14 and not flags & SINGLE_STRING:
                    k = 0  # not a character constant: for example an apostrophe in #error text
            elif c == 96 and flags & TEMPLATE:
                k = end_of_template(data, i + 1, end)
            elif c == 96 and flags & BACKTICK_RAW:
                j = i + 1
                while j < end and data[j] != 96:
                    j += 1
                k = j + 1 if j < end else -1
            elif c == 92 and i + 1 < end and data[i + 1] == 10 and flags & PREPROCESSOR:
                i += 2
                continue
            elif c == 35 and flags & PREPROCESSOR and not in_directive:
                j = i - 1
                while j >= begin and _CLASS[data[j]] == 1:
                    j -= 1
                if j < begin or data[j] == 10:
                    in_directive = True
                    line_tokens = 0
            elif c == 47 and flags & REGEX:
                may = last_kind == PUNCTUATION and last_byte != 41 and last_byte != 93 and last_byte != 125
                if last_kind == -1:
                    may = True
                elif last_kind == WORD:
                    for word in regex_words:
                        if word == last_hash:
                            may = True
                if may:
                    k = end_of_regex(data, i + 1, end)
            token_end = i + _operator_size(data, i, end, False)
        if k > 0:
            token_end, token_kind = k, STRING
        if token_end > end:
            token_end = end
        if k < 0:  # a lone quote costs only its line, unless that line is long
            is_quote = c == 34 or c == 39 or (c == 47 and i + 1 < end and data[i + 1] != 42)
            if not is_quote or end_of_line(data, i, min(end, i + LONG_LINE)) == i + LONG_LINE:
                unclosed += 1
        # --- brackets --------------------------------------------------------------------------------------------
        if token_kind == PUNCTUATION:
            if c == 40 or c == 91 or c == 123:
                depth += 1
            elif (c == 41 or c == 93 or c == 125) and depth > 0:
                depth -= 1
        # --- write the token -------------------------------------------------------------------------------------
        h = hash_bytes(data, i, token_end)
        hashes[count], kinds[count], starts[count], ends[count] = h, token_kind, i, token_end
        count += 1
        line_tokens += 1
        stats[3] += token_end - i
        if token_kind == STRING:
            stats[1] += token_end - i
        elif token_kind == NUMBER:
            stats[2] += token_end - i
        last_kind = token_kind
        last_byte = data[token_end - 1]
        last_hash = h
        i = token_end
    if line_tokens > 0 and (family != CLIKE or in_directive):
        hashes[count], kinds[count], starts[count], ends[count] = NEWLINE, LAYOUT, end, end
        count += 1
    while indent_level > 0:
        indent_level -= 1
        hashes[count], kinds[count], starts[count], ends[count] = DEDENT, LAYOUT, end, end
        count += 1
    return count
