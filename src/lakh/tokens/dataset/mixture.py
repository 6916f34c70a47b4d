"""Mix several token sets: global sequence index -> (source, sequence number in that source).

Indexes are assigned in blocks of BLOCK. Every block holds each source in proportion to its weight (largest remainders
get the extra ones), in an order that depends on (seed, block). The share of a source is exact in every block, and any
index is found without counting from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lakh.errors import UserError
from lakh.tokens.dataset.shuffle import ShuffleOrder

__all__ = ["BLOCK", "Mixture", "counts_of"]

BLOCK = 4096


def counts_of(weights: Sequence[float]) -> list[int]:
    """The number of sequences of each source in a block; at least one."""
    shares = np.asarray(weights, np.float64) / np.sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    for source in np.argsort(counts - shares, kind="stable")[: BLOCK - int(counts.sum())]:
        counts[source] += 1
    if (counts == 0).any():
        worst = int(np.argmin(shares))
        found = f"source {worst} has {weights[worst]:g} of {np.sum(weights):g}, less than one sequence in {BLOCK}"
        raise UserError("data.mixture", found, "give it a larger weight or remove it")
    return [int(count) for count in counts]


class Mixture:
    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts, self._seed = counts_of(weights), seed
        self._source_at = np.repeat(np.arange(len(weights)), self.counts)
        self._number_at = np.concatenate([np.arange(count) for count in self.counts])
        self._block_order = functools.lru_cache(maxsize=4)(self._compute_block_order)

    def locate(self, index: int) -> tuple[int, int]:
        """(source, number of the sequence in that source)."""
        if len(self.counts) == 1:
            return 0, index
        block, offset = divmod(index, BLOCK)
        place = self._block_order(block)[offset]
        source = int(self._source_at[place])
        return source, block * self.counts[source] + int(self._number_at[place])

    def _compute_block_order(self, block: int) -> np.ndarray:
        return ShuffleOrder(BLOCK, self._seed ^ 0x6D6978).permute(np.arange(block * BLOCK, (block + 1) * BLOCK))
