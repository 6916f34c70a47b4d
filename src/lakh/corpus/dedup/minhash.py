"""MinHash signatures of token streams: compare two texts without reading them again.

A text is the set of its runs of SHINGLE words. `signature` computes BANDS keys, each of ROWS MinHashes, to find
candidates, and keeps the SKETCH smallest hashes to measure their similarity.

Compiled with numba at first use and cached. Cost: one vector pass over the shingles for each of the 128 permutations,
about 5 ns a byte of text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.corpus.compiled import compiled

__all__ = ["BANDS", "MULTIPLIERS", "OFFSETS", "ROWS", "SHINGLE", "SKETCH", "shingles", "signature"]

SHINGLE = 5
"""Words per shingle."""
BANDS, ROWS = 16, 8
SKETCH = 1024
STRING = 2  # lexer.STRING: names, numbers and strings are words, the kinds above are not

_rng = np.random.Generator(np.random.PCG64(0x1A4B))
MULTIPLIERS = (_rng.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32) | np.uint32(1)).astype(np.uint32)
OFFSETS = _rng.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32)


@compiled
def shingles(hashes: Any, kinds: Any, count: int, words: Any, result: Any) -> int:
    """32-bit hashes of every run of SHINGLE words (names, numbers, strings); returns their number."""
    n = 0
    for t in range(count):
        if kinds[t] <= STRING:
            words[n] = hashes[t]
            n += 1
    if n == 0:
        return 0
    length = min(n, SHINGLE)
    made = n - length + 1
    for t in range(made):
        h = np.int64(0)
        for k in range(length):
            h = (h + words[t + k]) * np.int64(-7046029254386353131)
            h = h ^ ((h >> 32) & np.int64(0xFFFFFFFF))
        result[t] = np.uint32(h & np.int64(0xFFFFFFFF))
    return made


@compiled
def signature(values: Any, count: int, multipliers: Any, offsets: Any, bands: Any, sketch: Any) -> int:
    """Band keys (BANDS of them) of the MinHash of `values`, and the SKETCH smallest distinct values, sorted.

    Returns the size of the sketch. With fewer than SKETCH distinct values it holds all of them, and the Jaccard
    similarity of two such sketches is exact.
    """
    lowest = np.empty(BANDS * ROWS, np.uint32)
    for p in range(BANDS * ROWS):  # one permutation at a time: the inner loop is a vector minimum
        multiplier, offset = multipliers[p], offsets[p]
        low = np.uint32(0xFFFFFFFF)
        for t in range(count):
            x = np.uint32(values[t] * multiplier + offset)
            low = x if x < low else low
        lowest[p] = low
    for b in range(BANDS):
        h = np.int64(b + 1)
        for r in range(ROWS):
            h = (h ^ np.int64(lowest[b * ROWS + r])) * np.int64(-7046029254386353131)
            h = h ^ ((h >> 31) & np.int64(0x1FFFFFFFF))
        bands[b] = h
    # Only the smallest values can be in the sketch: discard the others before sorting.
    limit = np.int64(0xFFFFFFFF)
    if count > 4 * SKETCH:
        limit = np.int64(0xFFFFFFFF) // count * (2 * SKETCH)
    found = 0
    while True:
        few = np.empty(count, np.uint32)
        n = 0
        for t in range(count):
            if np.int64(values[t]) <= limit:
                few[n] = values[t]
                n += 1
        few = np.sort(few[:n])
        found = 0
        for t in range(n):
            if found < SKETCH and (t == 0 or few[t] != few[t - 1]):
                sketch[found] = few[t]
                found += 1
        if found == SKETCH or limit >= np.int64(0xFFFFFFFF):
            return found
        limit = np.int64(0xFFFFFFFF)  # many repeated shingles: look at all of them
