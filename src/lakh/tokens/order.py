"""The order of the training data: a keyed bijection from the global sequence index to a window.

Epoch e visits each of n windows once, in an order that depends only on (seed, e). Nothing is stored and
nothing is shuffled: any rank can ask for any index at any time, which is what makes resume and resize
exact.

A Feistel network permutes [0, 4**h), the smallest such range that holds n; an index that lands outside [0,
n) is sent through again until it lands inside (cycle walking: under 4 passes on average). It is a shuffle,
not a cipher.

Cost: ROUNDS * O(passes) numpy operations for a whole array of indexes; no memory beyond it.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["Order"]

ROUNDS = 6
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # odd constants with mixed bits


class Order:
    """Global sequence index -> window index, for `num_windows` windows."""

    def __init__(self, num_windows: int, seed: int) -> None:
        assert num_windows >= 1
        self.num_windows, self.seed = num_windows, seed
        self._half = np.uint64(max(1, ((num_windows - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)

    def windows(self, indexes: np.ndarray) -> np.ndarray:
        """The window of each global sequence index (non-negative integers), as int64."""
        indexes = np.asarray(indexes, np.int64)
        epochs, places = np.divmod(indexes, self.num_windows)
        result = np.empty(indexes.shape, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permute(places[chosen].astype(np.uint64), int(epoch)).astype(np.int64)
        return result

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:
        keys = self._round_keys(epoch)
        result = self._feistel(places, keys)
        outside = result >= np.uint64(self.num_windows)
        while outside.any():  # ends: the walk is a cycle of a permutation and began inside
            result[outside] = self._feistel(result[outside], keys)
            outside = result >= np.uint64(self.num_windows)
        return result

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right

    def _round_keys(self, epoch: int) -> np.ndarray:
        name = f"{self.seed}:{epoch}".encode()
        words = hashlib.blake2b(name, digest_size=8 * ROUNDS, person=b"lakh-order").digest()
        return np.frombuffer(words, "<u8").astype(np.uint64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread every input bit over all output bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
