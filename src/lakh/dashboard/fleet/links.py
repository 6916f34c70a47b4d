"""Bandwidth between every two ranks, as `lakh health pairs --json` measured it: RUN/pairs.json, or the file beside the
runs.

The map has at most MAX_CELLS rows and columns; in a larger one each cell stands for several neighbouring ranks and
shows the slowest of their pairs, so that no slow link is hidden.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.dashboard.numbers import finite
from lakh.errors import LakhError

__all__ = ["link_map"]

FILE = "pairs.json"
MAX_BYTES = 64 << 20
MAX_CELLS = 64
MAX_RANKS = 1 << 20
MAX_ROWS = 12
MAX_TEXT = 200


def link_map(run_dir: Path) -> dict[str, Any] | None:
    """None if no pairs were measured."""
    for path in (run_dir / FILE, run_dir.parent / FILE):
        pairs, faulty = _read(path)
        if pairs:
            return _map(pairs, faulty) | {"path": str(path)}
    return None


def _map(pairs: list[tuple[int, int, float, bool]], faulty: dict[str, Any]) -> dict[str, Any]:
    size = 1 + max(second for _, second, _, _ in pairs)
    per_cell = -(-size // MAX_CELLS)
    side = -(-size // per_cell)
    cells: list[list[float | None]] = [[None] * side for _ in range(side)]
    wrong = set()
    for first, second, rate, is_right in pairs:
        row, column = first // per_cell, second // per_cell
        slowest = cells[row][column]
        cells[row][column] = cells[column][row] = rate if slowest is None else min(rate, slowest)
        if not is_right:
            wrong |= {(row, column), (column, row)}
    slow = sorted(pairs, key=lambda pair: (pair[3], pair[2]))[:MAX_ROWS]
    return {
        "size": size,
        "ranks_per_cell": per_cell,
        "GBps": [[None if rate is None else float(f"{rate:.4g}") for rate in row] for row in cells],
        "wrong": sorted(map(list, wrong)),
        "median_GBps": float(f"{statistics.median(pair[2] for pair in pairs):.4g}"),
        "pairs": len(pairs),
        "slowest": [dict(zip(("first", "second", "GBps", "is_right"), pair, strict=True)) for pair in slow],
        "faulty": {str(rank)[:MAX_TEXT]: str(reason)[:MAX_TEXT] for rank, reason in list(faulty.items())[:MAX_ROWS]},
    }


def _read(path: Path) -> tuple[list[tuple[int, int, float, bool]], dict[str, Any]]:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
            return [], {}
        found = json.loads(storage.read_bytes(path))
    except (OSError, ValueError, LakhError, RecursionError):
        return [], {}
    rows = found.get("pairs") if isinstance(found, dict) else None
    pairs = [pair for row in rows if (pair := _pair(row)) is not None] if isinstance(rows, list) else []
    faulty = found.get("faulty") if isinstance(found, dict) else None
    return pairs, faulty if isinstance(faulty, dict) else {}


def _pair(row: Any) -> tuple[int, int, float, bool] | None:
    if not isinstance(row, dict):
        return None
    ranks: list[Any] = [row.get("first"), row.get("second")]
    if not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks) or ranks[0] == ranks[1]:
        return None
    rate = finite(row.get("GBps"))
    return None if rate is None or rate < 0 else (min(ranks), max(ranks), rate, row.get("is_right") is not False)
