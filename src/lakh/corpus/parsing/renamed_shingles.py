"""Shingles that do not depend on names: runs of tokens in which a name is written as the distance to its last use.

Two texts that differ by a consistent renaming have the same shingles, and a renaming of some names changes only the
runs where two names become one. Words that languages reserve, numbers, strings and punctuation stay as they are.
Cost: linear, about 10 ns a byte.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import LAYOUT, WORD, hash_of

__all__ = ["RENAMED_SHINGLE", "renamed_shingles", "reserved_words"]

RENAMED_SHINGLE = 16
"""Tokens per shingle: more than the words of minhash.SHINGLE, since a token without its name says less."""

RESERVED = """
and as assert async await break case catch class const continue crate def default defer del do elif else enum except
export extends extern false final finally fn for from func function goto if impl implements import in instanceof
interface is lambda let mut namespace new nil none not null nullptr or override package pass private protected pub
public raise return sizeof static struct super switch template this throw throws trait true try typedef typeof union
unsafe var virtual void volatile where while with yield False None True
"""


@lru_cache(maxsize=1)
def reserved_words() -> np.ndarray:
    return np.array(sorted({hash_of(word) for word in RESERVED.split()}), np.int64)


@compiled
def renamed_shingles(hashes: Any, kinds: Any, count: int, reserved: Any, words: Any, result: Any) -> int:
    """32-bit hashes of every run of RENAMED_SHINGLE tokens; returns their number. `words` and `result` need `count`."""
    size = 64
    while size < 2 * count:
        size *= 2
    names = np.zeros(size, np.int64)  # a hash table: the name, and its last position plus one
    last = np.zeros(size, np.int64)
    previous = np.full(count, -1, np.int64)  # of a name: its last position, -2 if it has none; -1 for other tokens
    n = 0
    for t in range(count):
        if kinds[t] == LAYOUT:
            continue
        h = hashes[t]
        words[n] = h
        if kinds[t] == WORD:
            at = np.searchsorted(reserved, h)
            if at == len(reserved) or reserved[at] != h:
                slot = h & (size - 1)
                while last[slot] > 0 and names[slot] != h:
                    slot = (slot + 1) & (size - 1)
                previous[n] = last[slot] - 1 if last[slot] > 0 else -2
                names[slot] = h
                last[slot] = n + 1
        n += 1
    if n == 0:
        return 0
    length = min(n, RENAMED_SHINGLE)
    made = n - length + 1
    for t in range(made):
        h = np.int64(0)
        for i in range(t, t + length):
            word = words[i]
            if previous[i] != -1:
                word = np.int64(i - previous[i] if previous[i] >= t else 0)
            h = (h + word) * np.int64(-7046029254386353131)
            h = h ^ ((h >> 32) & np.int64(0xFFFFFFFF))
        result[t] = np.uint32(h & np.int64(0xFFFFFFFF))
    return made
