"""A cache of rows in fast memory over a larger table in a slower tier: host memory or a file. Independent of torch.

The cache holds the rows of the current step and those that the policy keeps. `admit` makes rows resident and returns
their slots; evicted rows are written back. All columns of a row's state move together, so a row is the same bits in
either tier.

    lru         evicts the rows that were used the longest time ago
    lfu         evicts the rows that were used in the fewest steps
    lookahead   evicts the rows whose next use is farthest away, as far as the coming batches are known (Belady 1966),
                then by lru

Legend: R rows of the table, K slots of the cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from lakh.errors import DiskFull, InfeasiblePlan
from lakh.spec.embedding import CachePolicy

__all__ = ["RowCache", "file_rows"]


def file_rows(folder: str, shape: tuple[int, int]) -> np.ndarray:
    """A table of zeros of f32 in a file without a name, mapped into memory; it may be larger than memory."""
    size = 4 * shape[0] * shape[1]
    try:
        with tempfile.TemporaryFile(dir=folder or None, prefix="lakh-tables-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal later
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        where, found = folder or tempfile.gettempdir(), f"cannot hold {size:,} bytes of a table ({error.strerror})"
        raise DiskFull(where, found, "choose another dlrm.memory.folder, or use more ranks") from None


class RowCache:
    def __init__(
        self,
        name: str,
        backing: Mapping[str, np.ndarray],
        arrays: Mapping[str, np.ndarray],
        policy: CachePolicy = "lru",
    ) -> None:
        """`backing`: the arrays of the slower tier by name, R rows each; `arrays`: those of fast memory, K rows."""
        self._name, self.backing, self.arrays, self._policy = name, dict(backing), dict(arrays), policy
        rows, self.slots = (len(next(iter(tier.values()))) for tier in (self.backing, self.arrays))
        self._slot_of_row = np.full(rows, -1, np.int64)
        self._row_of_slot = np.full(self.slots, -1, np.int64)
        self._used = np.zeros(self.slots, np.int64)  # lru, lookahead: the last step; lfu: the number of steps
        self._clock = 0
        self._is_pinned = np.zeros(self.slots, np.bool_)  # slots of the passes since the last `release`
        self.hits = self.misses = 0
        """Rows that a step found in the cache, or did not."""

    def admit(self, rows: np.ndarray, coming: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Make rows resident until `release`; returns the slot of each. `coming`: the rows of the next batches."""
        self._clock += 1
        wanted = np.unique(rows)
        slots = self._slot_of_row[wanted]
        absent, present = wanted[slots < 0], slots[slots >= 0]
        new = present[~self._is_pinned[present]]  # a row counts once in a step
        self.hits, self.misses = self.hits + len(new), self.misses + len(absent)
        self._is_pinned[present] = True
        if len(absent):
            taken = self._make_room(len(absent), coming)
            for key, array in self.arrays.items():
                array[taken] = self.backing[key][absent]
            self._slot_of_row[absent], self._row_of_slot[taken] = taken, absent
            self._used[taken] = 0
            self._is_pinned[taken] = True
            new = np.concatenate([new, taken])
        self._used[new] = self._used[new] + 1 if self._policy == "lfu" else self._clock
        return self._slot_of_row[rows]

    def release(self) -> None:
        """The rows that were admitted may be evicted from now on."""
        self._is_pinned[:] = False

    def clear(self) -> None:
        """Write all rows back and forget them; the slower tier is then complete."""
        self._write_back(np.flatnonzero(self._row_of_slot >= 0))
        self._slot_of_row[:], self._row_of_slot[:] = -1, -1
        self.release()

    def _make_room(self, count: int, coming: Sequence[np.ndarray]) -> np.ndarray:
        free = np.flatnonzero(self._row_of_slot < 0)[:count]
        missing = count - len(free)
        if not missing:
            return free
        candidates = np.flatnonzero((self._row_of_slot >= 0) & ~self._is_pinned)
        if len(candidates) < missing:
            found = f"a step uses {int(self._is_pinned.sum()) + count:,} rows, its cache holds {self.slots:,}"
            raise InfeasiblePlan(f"table {self._name}", found, "make the cache larger, or the batch smaller")
        keys = [self._used[candidates]]
        if self._policy == "lookahead":
            keys.append(-self._next_use(candidates, coming))  # the last key counts first
        victims = candidates[np.lexsort([candidates, *keys])[:missing]]
        self._write_back(victims)
        self._slot_of_row[self._row_of_slot[victims]] = -1
        self._row_of_slot[victims] = -1
        return np.concatenate([free, victims])

    def _next_use(self, slots: np.ndarray, coming: Sequence[np.ndarray]) -> np.ndarray:
        """The number of the batch that uses the row of each slot next; the number of batches if none does."""
        uses = np.full(self.slots, len(coming), np.int64)
        for number in range(len(coming) - 1, -1, -1):
            resident = self._slot_of_row[coming[number]]
            uses[resident[resident >= 0]] = number
        return uses[slots]

    def _write_back(self, slots: np.ndarray) -> None:
        rows = self._row_of_slot[slots]
        order = np.argsort(rows)  # a file is written from its start to its end
        for key, array in self.arrays.items():
            self.backing[key][rows[order]] = array[slots[order]]
