"""The shuffle order of the training data: a keyed bijection from the global index to a sequence of the token set.

Epoch e visits each of n sequences once, in an order that depends only on (seed, e). Nothing is stored: any rank can
compute any index at any time, which makes resuming and resizing exact.

A Feistel network permutes [0, 4**h), the smallest such range that holds n; an index outside of [0, n) is permuted again
until it is inside (cycle walking: under 4 passes on average). Cost: ROUNDS * O(passes) numpy operations for a whole
array of indexes.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["ShuffleOrder"]

ROUNDS = 6
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # odd constants with mixed bits


class ShuffleOrder:
    """Global index -> sequence index, for `num_sequences` sequences."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        assert num_sequences >= 1
        self.num_sequences, self.seed = num_sequences, seed
        self._half = np.uint64(max(1, ((num_sequences - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)

    def permute(self, indexes: np.ndarray) -> np.ndarray:
        """The sequence of each global index (non-negative integers), as int64."""
        indexes = np.asarray(indexes, np.int64)
        epochs, places = np.divmod(indexes, self.num_sequences)
        result = np.empty(indexes.shape, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permute(places[chosen].astype(np.uint64), int(epoch)).astype(np.int64)
        return result

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:
        keys = self._round_keys(epoch)
        result = self._feistel(places, keys)
        outside = result >= np.uint64(self.num_sequences)
        while outside.any():  # ends: the walk is a cycle of a permutation and started inside
            result[outside] = self._feistel(result[outside], keys)
            outside = result >= np.uint64(self.num_sequences)
        return result

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right

    def _round_keys(self, epoch: int) -> np.ndarray:
        name = f"{self.seed}:{epoch}".encode()
        digest = hashlib.blake2b(name, digest_size=8 * ROUNDS, person=b"lakh-order").digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread every input bit over all output bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
