"""Which source a sequence comes from, and its number there: a function of the global sequence index.

Indexes are dealt out in blocks of BLOCK. Every block holds each source equally often, by its weight (largest
remainders get the odd ones), in an order of its own that depends on (seed, block). So the share of a source is exact
in every block, and any index is found without counting from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lakh.errors import UserError
from lakh.tokens.order import Order

__all__ = ["BLOCK", "Mixture", "counts_of"]

BLOCK = 4096


def counts_of(weights: Sequence[float]) -> list[int]:
    """How often each source is in a block; every one at least once."""
    shares = np.asarray(weights, np.float64) / np.sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    for source in np.argsort(counts - shares, kind="stable")[: BLOCK - int(counts.sum())]:
        counts[source] += 1
    if (counts == 0).any():
        worst = int(np.argmin(shares))
        found = f"source {worst} has {weights[worst]:g} of {np.sum(weights):g}, less than one sequence in {BLOCK}"
        raise UserError("data.mixture", found, "give it a larger weight or leave it out")
    return [int(count) for count in counts]


class Mixture:
    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts, self._seed = counts_of(weights), seed
        self._of_place = np.repeat(np.arange(len(weights)), self.counts)
        self._number_of_place = np.concatenate([np.arange(count) for count in self.counts])
        self._places = functools.lru_cache(maxsize=4)(self._places_of)

    def locate(self, index: int) -> tuple[int, int]:
        """(source, number of this sequence among those of the source)."""
        if len(self.counts) == 1:
            return 0, index
        block, offset = divmod(index, BLOCK)
        place = self._places(block)[offset]
        source = int(self._of_place[place])
        return source, block * self.counts[source] + int(self._number_of_place[place])

    def _places_of(self, block: int) -> np.ndarray:
        return Order(BLOCK, self._seed ^ 0x6D6978).windows(np.arange(block * BLOCK, (block + 1) * BLOCK))
