"""TorchRec's planner statistics: the text that its EmbeddingStats prints, read as tables, costs and a plan.

The text has a row per rank (estimated time) and a row per table (sharding type, estimated time with its parts,
memory, dimensions, ranks). Costs of the tables as TorchRec sharded them are its own; a column-wise slice that is
divided further is charged TorchRec's penalty for narrow rows on the compute part, and its share of the communication
and memory. Tables on all ranks stay as they are: the text does not say what another type would cost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lakh.errors import UserError
from lakh.planner.embedding.cost_model import slice_counts, width_penalty
from lakh.planner.embedding.options import ShardingLimits, ShardingOption, column_slices
from lakh.spec.embedding import EmbeddingTable, ShardingKind

__all__ = ["PublishedTable", "TorchRecStats", "is_torchrec_stats", "read_torchrec_stats"]

GIB = 2**30
_TITLE = "--- Planner Statistics ---"
_COLUMNS = (
    "FQN",
    "Sharding",
    "Perf (ms)",
    "Storage (HBM, DDR)",
    "Sum Pooling Factor",
    "Features",
    "Hash Size",
    "Ranks",
)
_PERF = re.compile(r"([\d.]+) \(([\d.,e-]+)\)")
_STORAGE = re.compile(r"\(([\d.]+) GB, ([\d.]+) GB\)")
_DIMENSIONS = re.compile(r"(\d+)(?: \((\d+)\))?")


@dataclass(frozen=True, slots=True)
class PublishedTable:
    table: EmbeddingTable
    sharding: str
    """TorchRec's abbreviation: TW, CW, RW, ..."""
    slice_width: int
    compute_ms: float
    """Summed over its shards."""
    communication_ms: float
    bytes: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TorchRecStats:
    """Tables of a published plan; gives their options to the planner."""

    published: dict[str, PublishedTable]
    limits: ShardingLimits
    bottleneck_ms: float
    """Of the published plan."""
    name: str = "torchrec (imported statistics)"

    @property
    def tables(self) -> list[EmbeddingTable]:
        return [entry.table for entry in self.published.values()]

    def options(self, table: EmbeddingTable) -> list[ShardingOption]:
        entry = self.published[table.name]
        ranks, shards = self.limits.ranks, len(entry.ranks)
        if entry.sharding not in ("TW", "CW"):
            time_ms = (entry.compute_ms + entry.communication_ms) / ranks
            size = int(entry.bytes / ranks)
            return [ShardingOption("row-wise", "device", (table.width,), (time_ms,), (size,), "all")]
        found = []
        for parts in slice_counts(entry.slice_width, self.limits.min_width):
            widths = tuple(w for _ in range(shards) for w in column_slices(entry.slice_width, parts))
            found.append(self._columns(entry, widths))
        return [option for option in found if max(option.slice_bytes) <= self.limits.tier_bytes["device"]]

    def _columns(self, entry: PublishedTable, widths: tuple[int, ...]) -> ShardingOption:
        total, published_penalty = entry.table.width, width_penalty(entry.slice_width)
        times = [
            w / total * (entry.compute_ms * width_penalty(w) / published_penalty + entry.communication_ms)
            for w in widths
        ]
        sizes = tuple(int(entry.bytes * w / total) for w in widths)
        kind: ShardingKind = "column-wise" if len(widths) > 1 else "table-wise"
        return ShardingOption(kind, "device", widths, tuple(times), sizes, "rank")


def is_torchrec_stats(text: str) -> bool:
    return _TITLE in text[:20_000]


def read_torchrec_stats(text: str, *, min_width: int, node_size: int = 8, origin: str = "statistics") -> TorchRecStats:
    lines = [line.strip().strip("#").strip() for line in text.splitlines()]
    rows = [re.split(r" {2,}", line) for line in lines]
    header = next((index for index, row in enumerate(rows) if row[:2] == ["FQN", "Sharding"]), None)
    if header is None:
        raise UserError(origin, "has no table of parameters (FQN, Sharding, ...)", "print it with debug=True")
    names = rows[header]
    if missing := [name for name in _COLUMNS if name not in names]:
        raise UserError(origin, f"has no column {missing[0]!r}", "print it with a current TorchRec")
    ranks = sum(1 for row in rows[:header] if len(row) >= 5 and row[0].isdigit())
    if not ranks:
        raise UserError(origin, "has no rows of ranks", "print it with debug=True")
    width_column = next((index for index, name in enumerate(names) if name.startswith("Emb Dim")), None)
    if width_column is None:
        raise UserError(origin, "has no column 'Emb Dim'", "print it with a current TorchRec")
    published: dict[str, PublishedTable] = {}
    for number, row in enumerate(rows[header + 2 :], header + 3):
        if len(row) < len(names) - 1:
            break
        cells = dict(zip(names, row, strict=False)) | {"width": row[width_column]}
        entry = _table(cells, ranks, f"{origin}, line {number}")
        if entry.table.name in published:  # TorchRec's own example, with replaced names, has one name twice
            entry = replace(entry, table=replace(entry.table, name=f"{entry.table.name} (line {number})"))
        published[entry.table.name] = entry
    if not published:
        raise UserError(origin, "has no tables", "print it with debug=True")
    worst = re.search(r"Maximum of Total Perf: ([\d.]+) ms", text)
    limits = ShardingLimits(
        ranks, min(node_size, ranks), {"device": _table_bytes(text), "host": 0, "file": 0}, min_width
    )
    return TorchRecStats(published, limits, float(worst[1]) if worst else 0.0)


def _table(cells: dict[str, str], ranks: int, where: str) -> PublishedTable:
    perf, storage = _PERF.match(cells["Perf (ms)"]), _STORAGE.match(cells["Storage (HBM, DDR)"])
    dimensions = _DIMENSIONS.match(cells["width"])
    if not (perf and storage and dimensions):
        raise UserError(where, "has no time, memory or dimension", "leave the text as TorchRec printed it")
    total_ms = float(perf[1])
    parts = [float(part) for part in perf[2].split(",")]
    compute = (parts[0] + parts[2] + (parts[4] if len(parts) > 4 else 0.0)) / (sum(parts) or 1.0) * total_ms
    width = int(dimensions[1])
    features = max(1, int(cells["Features"]))
    pooling = float(cells["Sum Pooling Factor"]) / features
    table = EmbeddingTable(
        name=cells["FQN"],
        rows=int(cells["Hash Size"]),
        width=width,
        pooling=max(pooling, 1e-3),  # the text prints three digits: 0.0 is a table that is looked up rarely
        features=features,
    )
    return PublishedTable(
        table=table,
        sharding=cells["Sharding"],
        slice_width=int(dimensions[2] or width),
        compute_ms=compute,
        communication_ms=total_ms - compute,
        bytes=float(storage[1]) * GIB,
        ranks=_ranks(cells["Ranks"], ranks, where),
    )


def _ranks(text: str, ranks: int, where: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    if not found or max(found) >= ranks:
        raise UserError(
            where, f"names rank {max(found, default=0)} of {ranks}", "leave the text as TorchRec printed it"
        )
    return tuple(found)


def _table_bytes(text: str) -> float:
    """Device memory for tables: what the plan may use less the dense part and the inputs."""

    def gib(title: str) -> float:
        found = re.search(title + r"[^\n]*\n#\s+HBM: ([\d.]+) GB", text)
        return float(found[1]) if found else 0.0

    return (gib("Planning Memory:") - gib(r"Dense Storage \(per rank\):") - gib(r"KJT Storage \(per rank\):")) * GIB
