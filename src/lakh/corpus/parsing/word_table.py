"""A table of words that kernels search by the hash of a token: keys and rows, in open addressing with linear probing.

Every name and operator of a text is looked up, so the table stays three quarters empty: most searches read one key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import hash_of

__all__ = ["NO_ROW", "row_of", "word_table"]

NO_ROW = -1
EMPTY = 0
SLOTS_PER_WORD = 4


def word_table(words: Mapping[str, Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, rows): keys[slot] is the hash of a word or EMPTY, rows[slot] are the `width` numbers of that word."""
    slots = 1 << (SLOTS_PER_WORD * len(words)).bit_length()
    keys, rows = np.full(slots, EMPTY, np.int64), np.zeros((slots, width), np.int64)
    for word, row in words.items():
        slot = hash_of(word) & (slots - 1)
        while keys[slot] != EMPTY:
            slot = (slot + 1) & (slots - 1)
        keys[slot], rows[slot] = hash_of(word), row
    return keys, rows


@compiled
def row_of(keys: Any, h: int) -> Any:
    """The row of the token with the hash `h`, or NO_ROW."""
    last = len(keys) - 1
    slot = h & last
    while keys[slot] != EMPTY:
        if keys[slot] == h:
            return slot
        slot = (slot + 1) & last
    return NO_ROW
