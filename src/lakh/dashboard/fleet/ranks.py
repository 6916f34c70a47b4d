"""The ranks of a run: where they are, which of them others wait for, and how much rank 0 sends.

Rank 0 writes after each step which rank was the slowest and how long the mean rank waited for it. Ranks are placed on
nodes in order, as launchers do; the mesh gives their coordinates.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from lakh.dashboard.numbers import counts, finite

__all__ = ["Fleet"]

MAX_BUCKETS = 60
"""Columns of the heat map."""
MAX_HEAT_ROWS = 64
"""Rows of the heat map: the ranks that others waited for the longest."""
MAX_CELLS = 2_048
"""Cells of the map of ranks; in a larger run each cell stands for several neighbouring ranks."""
MAX_TIERS = 4
MAX_RANKS = 1 << 20
AXES = ("dp_replicate", "pp", "dp_shard", "cp", "tp")
STATES = ("started", "unknown", "lost")
"""From the best to the worst."""


class Fleet:
    def __init__(self) -> None:
        self._started: dict[int, dict[str, Any]] = {}
        self._last_s: dict[int, float] = {}
        self._lost: set[int] = set()
        self._sent_bytes: dict[str, float] = {}
        self._steps, self._slowest, self._waited_s = array("d"), array("q"), array("d")

    def add(self, record: Mapping[str, Any]) -> None:
        """Add any record of any rank."""
        kind, rank = record["kind"], record.get("rank", 0)
        self._last_s[rank] = record["time_s"]
        if kind == "run_started":
            self._started[rank] = {"device": str(record.get("device", ""))[:80], "attempt": record.get("attempt")}
            if rank == 0:
                self._lost.clear()
        elif kind == "ranks_lost" and isinstance(record.get("lost"), list | tuple):
            self._lost |= {one for one in record["lost"] if isinstance(one, int)}
        elif kind == "network_traffic" and rank == 0:
            self._sent_bytes = counts(record.get("sent_bytes"))
        elif kind == "step_done" and _is_rank(record.get("slowest_rank")):
            self._steps.append(record["step"])
            self._slowest.append(record["slowest_rank"])
            self._waited_s.append(finite(record.get("straggler_s")) or 0.0)

    def data(self, *, begun: int | None, world: int | None, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the page shows; None before the first rank has started. `begun` ranks started, `world` are there now."""
        size = max(begun or 0, world or 0) or len(self._started)
        if not size:
            return None
        slowest, waited = np.array(self._slowest, dtype=np.int64), np.array(self._waited_s)
        known = (slowest >= 0) & (slowest < size)
        slowest, waited, steps = slowest[known], waited[known], np.array(self._steps)[known]
        totals = np.bincount(slowest, weights=waited, minlength=size)
        order = np.lexsort((np.arange(size), -totals))[:MAX_HEAT_ROWS]
        shown = sorted(int(rank) for rank in order if totals[rank] > 0)
        states = np.array([self._state(rank) for rank in range(size)])
        states[world or size :] = STATES.index("lost")
        per_cell = -(-size // MAX_CELLS)
        starts = np.arange(0, size, per_cell)
        return {
            "size": size,
            "ranks_per_cell": per_cell,
            "states": [STATES[worst] for worst in np.maximum.reduceat(states, starts)],
            "waited_s": [float(f"{most:.4g}") for most in np.maximum.reduceat(totals, starts)],
            "tiers": _tiers(settings, size),
            "mesh": _mesh(settings, size),
            "devices": sorted({found["device"] for found in self._started.values()})[:MAX_TIERS],
            "slowest": [
                {"rank": rank, "waited_s": float(totals[rank]), "steps": int((slowest == rank).sum())}
                for rank in sorted(shown, key=lambda rank: -totals[rank])[:12]
            ],
            "sent_bytes": dict(sorted(self._sent_bytes.items(), key=lambda row: -row[1])[:MAX_TIERS]),
            "heat": self._heat(shown, steps, slowest, waited),
        }

    def _state(self, rank: int) -> int:
        word = "lost" if rank in self._lost else "started" if rank in self._started else "unknown"
        return STATES.index(word)

    def _heat(self, shown: list[int], steps: Any, slowest: Any, waited: Any) -> dict[str, Any]:
        """Seconds that ranks waited for each of `shown`, by equal ranges of steps."""
        if not len(steps):
            return {"ranks": [], "first_step": 0, "last_step": 0, "rows": []}
        first, last = float(steps.min()), float(steps.max())
        buckets = min(MAX_BUCKETS, int(last - first) + 1)
        column = np.minimum(((steps - first) / (last - first + 1) * buckets).astype(np.int64), buckets - 1)
        rows = []
        for rank in shown:
            mine = slowest == rank
            row = np.bincount(column[mine], weights=waited[mine], minlength=buckets)
            rows.append([float(f"{value:.3g}") for value in row])
        return {"ranks": shown, "first_step": first, "last_step": last, "rows": rows}


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_RANKS


def _tiers(settings: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Groups of the cluster that hold some but not all ranks, from the smallest: nodes, racks, zones."""
    cluster = settings.get("cluster")
    found = cluster.get("tiers") if isinstance(cluster, dict) else None
    rows = [tier for tier in found if isinstance(tier, dict)] if isinstance(found, list) else []
    sizes = {str(tier.get("name", ""))[:40]: tier.get("size") for tier in rows[:MAX_TIERS]}
    return [{"name": name, "size": n} for name, n in sizes.items() if isinstance(n, int) and 0 < n < size]


def _mesh(settings: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Axes of the mesh with more than one rank, from the one whose ranks are farthest apart."""
    mesh = settings.get("mesh")
    if not isinstance(mesh, dict):
        return []
    order = mesh.get("order")
    names = [name for name in order if name in AXES] if isinstance(order, list) else list(AXES)
    sizes = {name: mesh.get(name, 1) for name in names}
    if not all(isinstance(value, int) and value != 0 for value in sizes.values()):
        return []
    others = math.prod(value for value in sizes.values() if value > 0)
    sizes = {name: value if value > 0 else max(1, size // others) for name, value in sizes.items()}
    fits = math.prod(sizes.values()) == size
    return [{"axis": name, "size": value} for name, value in sizes.items() if value > 1] if fits else []
