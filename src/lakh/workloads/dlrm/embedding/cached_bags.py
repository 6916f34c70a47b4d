"""Embedding tables whose rows are in a slower tier, with a cache in memory: same lookups, updates and bits.

    caches = {"item": CachedRows(slots=100_000, folder="/scratch")}   # without a folder: in host memory
    tables = CachedEmbeddingBags(tables, seed=1, caches=caches)
    out_BC = tables(ids, coming=[ids of the next batches])
    loss(out_BC).backward()
    tables.step(lr=0.01)

A row belongs to one slot at a time, and each row is updated by itself, so the numbering of the slots does not change
the result. Tables without an entry in `caches` are whole in memory. Files have no name and end with the process:
checkpoints keep the tables (`held_tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec.embedding import CachePolicy, EmbeddingTable, TableSlice
from lakh.workloads.dlrm.embedding import cpu_kernels
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags, HeldTensor, SparseSettings, weight_key
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.embedding.lookup import Lookup
from lakh.workloads.dlrm.embedding.row_cache import RowCache, file_rows

__all__ = ["CachedEmbeddingBags", "CachedRows"]

FILL_ROWS = 65_536  # rows of a new table that are computed at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRows:
    """How a table is cached."""

    slots: int
    """Rows in memory."""
    folder: str | None = None
    """Where the file of the other rows is; None: they are in host memory."""
    policy: CachePolicy = "lru"


class CachedEmbeddingBags(nn.Module):
    """Has the interface of EmbeddingBags."""

    def __init__(
        self,
        tables: Sequence[EmbeddingTable] | Sequence[TableSlice],
        *,
        seed: int,
        caches: Mapping[str, CachedRows],
        settings: SparseSettings | None = None,
    ) -> None:
        super().__init__()
        parts = [t if isinstance(t, TableSlice) else TableSlice.whole(t) for t in tables]
        self._held = EmbeddingBags([_slots_of(part, caches) for part in parts], seed=seed, settings=settings)
        self._tables = [_CachedTable(part, caches.get(part.table.name), self._held, seed) for part in parts]
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call backward; it has no gradient
        self._coming: Sequence[JaggedBags] = ()

    @property
    def columns(self) -> int:
        return self._held.columns

    @property
    def steps(self) -> Tensor:
        return self._held.steps

    @property
    def caches(self) -> list[RowCache]:
        return [table.cache for table in self._tables if table.cache is not None]

    @property
    def hit_rate(self) -> float:
        hits, misses = (sum(getattr(cache, name) for cache in self.caches) for name in ("hits", "misses"))
        return hits / max(1, hits + misses)

    def forward(self, bags: JaggedBags, coming: Sequence[JaggedBags] = ()) -> Tensor:
        self.look_ahead(coming)
        return Lookup.apply(self._anchor, self, bags)

    def look_ahead(self, coming: Sequence[JaggedBags]) -> None:
        """The batches after the next lookup."""
        self._coming = coming

    def lookup(self, bags: JaggedBags) -> Tensor:
        pooled = self._held.lookup(self._to_slots(bags))
        if not self.training:  # no step follows
            self._release()
        return pooled

    def keep_gradient(self, bags: JaggedBags, grad_BC: Tensor) -> None:
        self._held.keep_gradient(self._to_slots(bags), grad_BC)

    def gradient_square(self) -> float:
        return self._held.gradient_square()

    def step(self, lr: float, scale: float = 1.0) -> None:
        self._held.step(lr, scale)
        self._release()

    def discard(self) -> None:
        self._held.discard()
        self._release()

    def held_tensors(self) -> dict[tuple[str, str], HeldTensor]:
        """As EmbeddingBags has them, with all rows: those of the slower tier itself. Empties the caches, so that the
        tensors may be read or changed until the next lookup."""
        found = self._held.held_tensors()
        for table in self._tables:
            if table.cache is not None:
                table.cache.clear()
                for kind, array in table.cache.backing.items():
                    found[table.part.table.name, kind] = HeldTensor.of(table.part, torch.from_numpy(array))
        return found

    def _release(self) -> None:
        for cache in self.caches:
            cache.release()

    def _to_slots(self, bags: JaggedBags) -> JaggedBags:
        """The bags with slots of the caches in place of rows."""
        first, slots = 0, []
        for table in self._tables:
            end = first + table.part.table.features
            ids = bags.select(first, end).ids
            slots.append(table.admit(ids, [later.select(first, end).ids for later in self._coming]))
            first = end
        return JaggedBags(torch.cat(slots), bags.offsets, bags.features)


class _CachedTable:
    """A part of a table: whole in memory, or with a cache."""

    def __init__(self, part: TableSlice, rows: CachedRows | None, held: EmbeddingBags, seed: int) -> None:
        self.part, self.cache = part, None
        if rows is None:
            return
        tensors = {
            kind: held_part for (name, kind), held_part in held.held_tensors().items() if name == part.table.name
        }
        fast = {kind: held_part.local.numpy() for kind, held_part in tensors.items()}
        backing = {}
        for kind, array in fast.items():
            shape = (part.shape[0], array.shape[1])
            backing[kind] = np.zeros(shape, np.float32) if rows.folder is None else file_rows(rows.folder, shape)
        _fill(part, backing["weights"], seed)
        self.cache = RowCache(part.table.name, backing, fast, rows.policy)

    def admit(self, ids: Tensor, coming: list[Tensor]) -> Tensor:
        if self.cache is None:
            return ids
        rows = ids.numpy()
        bad = (rows < 0) | (rows >= self.part.shape[0])
        if bad.any():
            found = f"id {rows[bad][0]} is not in [0, {self.part.shape[0]})"
            raise UserError(f"table {self.part.table.name}", found, "check the data, or enlarge the table")
        return torch.from_numpy(self.cache.admit(rows, [np.unique(later.numpy()) for later in coming]))


def _slots_of(part: TableSlice, caches: Mapping[str, CachedRows]) -> TableSlice:
    """The slice of the cached rows, or the part itself."""
    if part.table.name not in caches:
        return part
    rows = min(caches[part.table.name].slots, part.shape[0])
    return TableSlice(replace(part.table, rows=rows), (0, rows), part.columns)


def _fill(part: TableSlice, weights: np.ndarray, seed: int) -> None:
    """The initial values of the whole table's part, a block of rows at a time."""
    key, table = weight_key(part.table, seed), part.table
    for first in range(0, len(weights), FILL_ROWS):
        values = np.empty((min(FILL_ROWS, len(weights) - first), weights.shape[1]), np.float32)
        first_row = part.rows[0] + first
        cpu_kernels.fill_uniform(values, key, first_row, part.columns[0], table.width, table.rows**-0.5)
        weights[first : first + len(values)] = values
