"""MinHash signatures of token streams: compare two texts without reading them again.

A text is the set of its runs of SHINGLE words (or of renamed_shingles.py). `signature` computes the keys of its bands,
each of several MinHashes, to find candidates, and keeps the SKETCH smallest hashes to measure their similarity.

Compiled with numba at first use and cached. Cost: one vector pass over the shingles for each MinHash, about 5 ns a byte
of text for 128 of them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lakh.compiled import compiled

__all__ = [
    "MAX_BANDS",
    "MULTIPLIERS",
    "OFFSETS",
    "SHINGLE",
    "SKETCH",
    "BandShape",
    "fit_bands",
    "shingles",
    "signature",
]

SHINGLE = 5
"""Words per shingle."""
SKETCH = 1024
RECALL = 0.94
"""A pair of exactly the threshold's similarity shares a band with at least this probability."""
MAX_MINHASHES, MINHASHES = 256, 128
"""For thresholds below USUAL_THRESHOLD, and for the others."""
USUAL_THRESHOLD = 0.8
MAX_BANDS = 64
STRING = 2  # lexer.STRING: names, numbers and strings are words, the kinds above are not

_rng = np.random.Generator(np.random.PCG64(0x1A4B))
_drawn = [_rng.integers(0, 2**32, MINHASHES, dtype=np.uint32) for _ in range(4)]  # two draws for each MINHASHES
MULTIPLIERS = np.concatenate([_drawn[0], _drawn[2]]) | np.uint32(1)
OFFSETS = np.concatenate([_drawn[1], _drawn[3]])


class BandShape(NamedTuple):
    """A signature has `bands` keys, each the hash of `rows` MinHashes."""

    bands: int
    rows: int

    def recall(self, similarity: float) -> float:
        """The probability that two texts of this similarity share a band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


@lru_cache(maxsize=64)
def fit_bands(threshold: float) -> BandShape:
    """The shape with the most rows, hence the fewest false candidates, that finds pairs of this similarity."""
    limit = MINHASHES if threshold >= USUAL_THRESHOLD else MAX_MINHASHES
    fitting = BandShape(1, limit) if threshold == 1 else BandShape(MAX_BANDS, 1)
    for rows in range(1, limit + 1):
        missed = math.log1p(-(threshold**rows)) if threshold < 1 else -math.inf
        bands = max(1, math.ceil(math.log(1 - RECALL) / missed))
        if bands <= MAX_BANDS and bands * rows <= limit:
            fitting = BandShape(bands, rows)
    return fitting


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
def signature(values: Any, count: int, multipliers: Any, offsets: Any, num_bands: int, rows: int, bands: Any, sketch: Any) -> int:  # fmt: skip  # noqa: E501
    """Keys of `num_bands` bands of `rows` MinHashes of `values`, and the SKETCH smallest distinct values, sorted.

    Returns the size of the sketch. With fewer than SKETCH distinct values it holds all of them, and the Jaccard
    similarity of two such sketches is exact.
    """
    lowest = np.empty(num_bands * rows, np.uint32)
    for p in range(num_bands * rows):  # one permutation at a time: the inner loop is a vector minimum
        multiplier, offset = multipliers[p], offsets[p]
        low = np.uint32(0xFFFFFFFF)
        for t in range(count):
            x = np.uint32(values[t] * multiplier + offset)
            low = x if x < low else low
        lowest[p] = low
    for b in range(num_bands):
        h = np.int64(b + 1)
        for r in range(rows):
            h = (h ^ np.int64(lowest[b * rows + r])) * np.int64(-7046029254386353131)
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
