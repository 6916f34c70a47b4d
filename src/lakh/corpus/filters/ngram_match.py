"""Find word n-grams of benchmark tasks in documents of any language: statements in comments, Markdown and JSON.

A rolling polynomial hash over lower-case words; linear in the text.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.filters.program_match import low_bits_table

__all__ = ["NgramIndex"]


class NgramIndex:
    """Word n-grams of tasks, by hash; an n-gram of several tasks belongs to the first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: dict[int, str] = {}
        self._keys, self._table = np.empty(0, np.int64), low_bits_table(np.empty(0, np.int64))

    def add(self, task: str, text: str) -> None:
        """Add the n-grams of which at least half are words of letters: tables of numbers are everywhere."""
        words = re.findall(r"[A-Za-z0-9]+", text)
        letters = np.cumsum([0] + [len(word) > 1 and not word.isdigit() for word in words])
        for at, gram in enumerate(_grams(np.frombuffer(text.encode(), np.uint8), self.size).tolist()):
            if letters[at + self.size] - letters[at] >= self.size // 2:
                self._tasks.setdefault(gram, task)

    def freeze(self) -> None:
        """Sort the n-grams; call once after the last `add`."""
        self._keys = np.array(sorted(self._tasks), np.int64)
        self._table = low_bits_table(self._keys)

    def find(self, data: bytes) -> str:
        """The task of the first n-gram that a text contains, or ""."""
        at = _find_gram(np.frombuffer(data, np.uint8), self.size, self._keys, self._table)
        return self._tasks[int(self._keys[at])] if at >= 0 else ""


@compiled
def _word_hashes(data: Any, result: Any) -> int:
    count = 0
    i = 0
    size = len(data)
    while i < size:
        c = data[i]
        if not (48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122):
            i += 1
            continue
        h = np.int64(7)
        while i < size:
            c = data[i]
            if 65 <= c <= 90:
                c = np.uint8(c + 32)
            if not (48 <= c <= 57 or 97 <= c <= 122):
                break
            h = (h ^ np.int64(c)) * np.int64(1099511628211)
            i += 1
        result[count] = h ^ ((h >> 29) & np.int64(0x7FFFFFFFF))
        count += 1
    return count


@compiled
def _roll(words: Any, count: int, size: int, result: Any) -> int:
    """Polynomial hashes of every run of `size` words, each from the one before."""
    base = np.int64(6364136223846793005)
    top = np.int64(1)
    for _ in range(size):
        top = top * base
    h = np.int64(0)
    made = 0
    for i in range(count):
        h = h * base + words[i]
        if i >= size:
            h = h - words[i - size] * top
        if i >= size - 1:
            result[made] = h ^ ((h >> 32) & np.int64(0xFFFFFFFF))
            made += 1
    return made


@compiled
def _grams(data: Any, size: int) -> Any:
    words = np.empty(len(data) // 2 + 1, np.int64)
    count = _word_hashes(data, words)
    result = np.empty(count + 1, np.int64)
    return result[: _roll(words, count, size, result)]


@compiled
def _find_gram(data: Any, size: int, grams: Any, table: Any) -> int:
    if len(grams) == 0:
        return -1
    for h in _grams(data, size):
        if table[h & np.int64(0xFFFF)]:
            at = np.searchsorted(grams, h)
            if at < len(grams) and grams[at] == h:
                return at
    return -1
