"""Nodes of a cluster that a job may use: all of them, what other jobs leave, or what a file of hosts says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lakh.errors import DataError, UserError
from lakh.planner.fabric.topology import Ints
from lakh.spec.cluster import Cluster

__all__ = ["FreeNodes", "fragmented", "read_hosts"]

LARGEST_JOB = 64
"""Nodes of the jobs that share a fragmented cluster."""


@dataclass(frozen=True)
class FreeNodes:
    numbers: Ints
    """Free nodes, by their position in the cluster: neighbours are near."""
    names: tuple[str, ...]
    """Of all nodes."""


def fragmented(cluster: Cluster, busy: float, seed: int) -> FreeNodes:
    """A cluster of which other jobs, of 1 to 64 neighbouring nodes, use a share."""
    total = cluster.gpus // cluster.node_size
    taken = np.zeros(total, dtype=np.bool_)
    rng = np.random.default_rng(seed)
    while taken.sum() < busy * total:
        size = min(int(2 ** rng.uniform(0, np.log2(LARGEST_JOB))), int(busy * total - taken.sum()) + 1)
        start = int(rng.integers(0, total))
        taken[start : start + size] = True
    width = len(str(total - 1))
    return FreeNodes(np.flatnonzero(~taken), tuple(f"node{n:0{width}}" for n in range(total)))


def read_hosts(path: str | Path, cluster: Cluster) -> FreeNodes:
    """A file with one line per node, in the order of the cluster: its name, and "busy" where another job runs."""
    total = cluster.gpus // cluster.node_size
    try:
        lines = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts {path}", f"cannot be read ({error})", "check the path") from None
    if len(lines) != total or any(len(line) > 2 or line[1:] not in ([], ["busy"]) for line in lines):
        found = f"has {len(lines)} lines, or other words than a name and busy"
        raise DataError(
            f"--hosts {path}", found, f"give the {total} nodes of {cluster.name} in their order, one per line"
        )
    free = np.array([number for number, line in enumerate(lines) if len(line) == 1], dtype=np.int64)
    return FreeNodes(free, tuple(line[0] for line in lines))
