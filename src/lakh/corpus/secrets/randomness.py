"""How unlike written text a value is: bits per character under a model of the character pairs in source code.

People write words; services generate random characters. `surprise_bits` is the mean cost of each character given the
one before it, from pair_bits.npy: words and identifiers cost about 3 to 4 bits, random letters and digits 6 and more.
Unlike Shannon entropy it tells `sendAccountSubsToGateway` from `x8KdR2vQbWz5TnLpYcJ3Hg7M`, which have equal entropies.

pair_bits.npy holds counts of pairs only (95 x 95 costs in 1/16 bit). `python -m bench.corpus.pair_bits DIR...` makes it
from any folders of source; the one shipped is from CPython's standard library, Guava and glibc's headers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

__all__ = ["PAIR_BITS", "entropy_bits", "fit_pair_bits", "surprise_bits"]

PAIR_BITS = Path(__file__).with_name("pair_bits.npy")
FIRST, LAST = 33, 126  # the printable characters; anything else, and the ends of a word, are one class
CLASSES = LAST - FIRST + 2
STEPS_PER_BIT = 16


def entropy_bits(text: str) -> float:
    """Shannon entropy per character."""
    counts = Counter(text).values()
    return sum(-n / len(text) * math.log2(n / len(text)) for n in counts)


def surprise_bits(value: str) -> float:
    """Mean bits per character of a value; 0 for an empty one."""
    if not value:
        return 0.0
    codes = _codes(value)
    return float(_pair_bits()[codes[:-1], codes[1:]].mean())


def fit_pair_bits(words: Iterable[str]) -> np.ndarray:
    """The costs from words, each counted once."""
    counts = np.full((CLASSES, CLASSES), 0.05)
    for word in set(words):
        codes = _codes(word)
        np.add.at(counts, (codes[:-1], codes[1:]), 1.0)
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return np.minimum(np.rint(bits * STEPS_PER_BIT), 255).astype(np.uint8)


def _codes(value: str) -> np.ndarray:
    """The class of each character, after a class 0 for the beginning."""
    codes = np.frombuffer(value.encode("latin-1", "replace"), np.uint8).astype(np.int64) - (FIRST - 1)
    return np.concatenate([[0], np.where((codes < 1) | (codes >= CLASSES), 0, codes)])


@lru_cache(maxsize=1)
def _pair_bits() -> np.ndarray:
    return np.load(PAIR_BITS).astype(np.float64) / STEPS_PER_BIT
