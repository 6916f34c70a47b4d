"""Write the tokens of a table-driven language by their value; groups.py has marked those to leave out."""

from __future__ import annotations

from typing import Any

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import LAYOUT, NUMBER, PUNCTUATION, STRING, WORD, hash_bytes
from lakh.corpus.parsing.normal_form.numbers import write_lower
from lakh.corpus.parsing.normal_form.strings import write_quoted
from lakh.corpus.parsing.table_driven.syntax import (
    AMPERSAND,
    CASELESS,
    FLAGS,
    GLUE,
    GLUE_FREE,
    LITERALS,
    PLAIN_QUOTES,
    SAME_QUOTES,
    SPACED,
    SPECIAL,
)

__all__ = ["write_by_table"]

SEPARATOR = 31
IS_SPACED, IS_GLUED = 28, 29
QUOTE = 34


@compiled
def write_by_table(data: Any, stop: int, count: int, hashes: Any, kinds: Any, starts: Any, ends: Any, rules: Any, bytes_of: Any, drop: Any, out: Any, to_hashes: Any, to_kinds: Any, to_starts: Any) -> Any:  # fmt: skip  # noqa: E501
    """Write the tokens that are not dropped; return (bytes of `out`, tokens)."""
    flags, literals = rules[FLAGS], rules[LITERALS]
    size = 0
    made = 0
    for t in range(count):
        if drop[t] == 1:
            continue
        kind, start, end, h = kinds[t], starts[t], ends[t], hashes[t]
        if kind == LAYOUT:
            out[size] = 10 if h == 3 else h
            size += 1
            to_hashes[made], to_kinds[made], to_starts[made] = h, kind, start
            made += 1
            continue
        c = data[start]
        if t > 0 and kinds[t - 1] != LAYOUT:
            before = data[ends[t - 1] - 1]
            if flags & GLUE and ends[t - 1] == start:
                is_free = bytes_of[c] & GLUE_FREE or (bytes_of[before] & GLUE_FREE and before != 41)
                if (c == 40 and before in (61, 36, 60, 62, 64, 63, 42, 43, 33)) or (
                    (c == 60 or c == 62) and kinds[t - 1] == NUMBER
                ):  # a=( $( <( >( and patterns
                    is_free = False
                if not is_free:
                    out[size] = IS_GLUED
                    size += 1
            elif bytes_of[c] & SPACED and kind == PUNCTUATION and ends[t - 1] < start:
                is_operand = kinds[t - 1] != PUNCTUATION or before in (41, 93, 125)
                is_operand = is_operand or (before in (42, 38) and c in (46, 58, 35, 91))  # * .a of CSS
                if is_operand and end < stop and data[end] > 32:
                    out[size] = IS_SPACED
                    size += 1
        begin = size
        is_lower = (kind == WORD and flags & CASELESS) or (kind == PUNCTUATION and literals & AMPERSAND)
        if kind == STRING and (c == 34 or c == 39) and flags & (SAME_QUOTES | PLAIN_QUOTES) and end - start > 1:
            if flags & SAME_QUOTES:
                size = write_quoted(data, start, end, out, size)
            elif _is_plain(data, start + 1, end - 1, bytes_of):
                out[size] = QUOTE
                size += 1
                for k in range(start + 1, end - 1):
                    out[size] = data[k]
                    size += 1
            else:
                for k in range(start, end):
                    out[size] = data[k]
                    size += 1
            h = hash_bytes(out, begin, size)
        elif is_lower:
            size = write_lower(data, start, end, out, size)
            h = hash_bytes(out, begin, size)
        else:
            for k in range(start, end):
                out[size] = data[k]
                size += 1
        out[size] = SEPARATOR
        size += 1
        to_hashes[made], to_kinds[made], to_starts[made] = h, kind, start
        made += 1
    return size, made


@compiled
def _is_plain(data: Any, begin: int, end: int, bytes_of: Any) -> bool:
    while begin < end and not bytes_of[data[begin]] & SPECIAL:
        begin += 1
    return begin == end
