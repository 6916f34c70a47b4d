"""How many nodes of each stage go to each group (zone, rack) so that the fewest bytes cross between groups.

The rows of a job's grid are interchangeable, so that counts n[stage, group] describe a placement up to symmetry:

    minimise   ring bytes x groups that each stage visits - send bytes x columns that two stages share in a group
    subject to n[stage, .] adds up to the stage, n[., group] fits into the group

Small problems are a mixed-integer program (HiGHS), larger ones take the better of two greedy placements
(stage by stage, column by column), refined by moving and exchanging nodes while the cut falls.
"""

from __future__ import annotations

import numpy as np

from lakh.errors import InfeasiblePlan
from lakh.planner.fabric.topology import Ints

__all__ = ["counts_cost", "greedy_counts", "minimum_cut_counts", "refine_counts"]

MOST_EXACT = 400
"""Stages x groups of the largest problem that is solved exactly."""
MOST_REFINED = 800
"""The same of the largest that is refined: two nodes of a rack have no better place in another one."""
SOLVER_LIMIT_S, SOLVER_NODES = 60.0, 100
"""Nodes of the solver's tree: a limit that does not depend on the machine. Its bound converges slowly, because groups
are interchangeable, its solutions do not."""
MOST_PASSES = 20


def counts_cost(counts: Ints, ring_bytes: float, send_bytes: float) -> float:
    """Bytes per step that cross, if rings visit each group once and columns stay together where they can."""
    visited = (counts > 0).sum(axis=1)
    rings = np.where(visited > 1, visited, 0).sum()
    columns = np.minimum(counts[1:].sum(axis=1), counts[:-1].sum(axis=1))
    apart = (columns - np.minimum(counts[1:], counts[:-1]).sum(axis=1)).sum()
    return float(rings * ring_bytes + apart * send_bytes)


def minimum_cut_counts(stage_nodes: Ints, room: Ints, ring_bytes: float, send_bytes: float) -> Ints:
    """n[stage, group] for stages of `stage_nodes` nodes and groups with `room` free nodes."""
    if stage_nodes.sum() > room.sum():
        found = f"{stage_nodes.sum()} nodes are needed, {room.sum()} are free"
        raise InfeasiblePlan("placement", found, "use fewer GPUs, or wait for other jobs")
    best = refine_counts(greedy_counts(stage_nodes, room, ring_bytes, send_bytes), room, ring_bytes, send_bytes)
    if len(stage_nodes) * len(room) <= MOST_EXACT and counts_cost(best, ring_bytes, send_bytes) > 0:
        exact = _solve(stage_nodes, room, ring_bytes, send_bytes)
        if exact is not None and counts_cost(exact, ring_bytes, send_bytes) < counts_cost(best, ring_bytes, send_bytes):
            return exact
    return best


def greedy_counts(stage_nodes: Ints, room: Ints, ring_bytes: float, send_bytes: float) -> Ints:
    """The better of stage by stage and column by column, with the largest groups first."""
    order = np.argsort(-room, kind="stable")
    found = []
    by_stage, left = np.zeros((len(stage_nodes), len(room)), dtype=np.int64), room.copy()
    for stage, wanted in enumerate(stage_nodes.tolist()):
        fits = [g for g in order if left[g] >= wanted]
        for group in [min(fits, key=lambda g: left[g])] if fits else order:  # the tightest group that holds it
            take = min(wanted, int(left[group]))
            by_stage[stage, group] += take
            left[group] -= take
            wanted -= take
    found.append(by_stage)
    by_column, left = np.zeros_like(by_stage), room.copy()
    remaining = stage_nodes.copy()
    for group in order:
        columns = min(int(left[group] // max((remaining > 0).sum(), 1)), int(remaining.max(initial=0)))
        several = np.minimum(remaining, columns)
        by_column[:, group] += several
        remaining -= several
        left[group] -= several.sum()
    for stage in np.flatnonzero(remaining).tolist():  # what is left of the columns
        for group in order:
            part = min(int(remaining[stage]), int(left[group]))
            by_column[stage, group] += part
            remaining[stage] -= part
            left[group] -= part
    found.append(by_column)
    return min(found, key=lambda counts: counts_cost(counts, ring_bytes, send_bytes))


def refine_counts(counts: Ints, room: Ints, ring_bytes: float, send_bytes: float) -> Ints:
    """Move or exchange all nodes, half of them or one between two groups while this makes the cut smaller."""
    counts = counts.copy()
    cost = counts_cost(counts, ring_bytes, send_bytes)
    stages, groups = counts.shape
    if stages * groups > MOST_REFINED:
        return counts
    for _ in range(MOST_PASSES):
        before = cost
        for stage in range(stages):
            for a in np.flatnonzero(counts[stage]):
                for b in range(groups):
                    cost = _try_moves(counts, room, stage, int(a), b, cost, ring_bytes, send_bytes)
        if cost >= before * (1 - 1e-12):
            return counts
    return counts


def _try_moves(
    counts: Ints, room: Ints, stage: int, a: int, b: int, cost: float, ring_bytes: float, send_bytes: float
) -> float:
    have = int(counts[stage, a])
    if a == b or not have:
        return cost
    for size in sorted({have, -(-have // 2), 1}, reverse=True):
        spare = int(room[b] - counts[:, b].sum())
        partners = [-1] if spare >= size else [s for s in np.flatnonzero(counts[:, b] >= size) if s != stage]
        for partner in partners:
            counts[stage, a] -= size
            counts[stage, b] += size
            if partner >= 0:
                counts[partner, b] -= size
                counts[partner, a] += size
            changed = counts_cost(counts, ring_bytes, send_bytes)
            if changed < cost * (1 - 1e-12):
                return changed
            counts[stage, a] += size
            counts[stage, b] -= size
            if partner >= 0:
                counts[partner, b] += size
                counts[partner, a] -= size
    return cost


def _solve(stage_nodes: Ints, room: Ints, ring_bytes: float, send_bytes: float) -> Ints | None:
    """The mixed-integer program; None if no solution was found in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    stages, groups = len(stage_nodes), len(room)
    cells, pairs = stages * groups, (stages - 1) * groups
    n, u, k, v = 0, cells, 2 * cells, 2 * cells + pairs  # nodes, visited, shared columns, stage visits more than one
    count = v + stages
    scale = max(ring_bytes, send_bytes, 1.0)
    cost = np.zeros(count)
    # A stage in one group costs nothing, in g > 1 groups g rings: visits - 1, and one more if there are several.
    cost[u : u + cells], cost[v:] = ring_bytes / scale, ring_bytes / scale
    cost[k : k + pairs] = -send_bytes / scale
    rows: list[tuple[list[int], list[float], float, float]] = []
    for s in range(stages):
        mine = [n + s * groups + g for g in range(groups)]
        rows.append((mine, [1.0] * groups, float(stage_nodes[s]), float(stage_nodes[s])))
        visits = [u + s * groups + g for g in range(groups)]
        rows.append(([*visits, v + s], [1.0] * groups + [-float(groups)], -np.inf, 1.0))
        rows += [
            ([n + i, u + i], [1.0, -float(stage_nodes[s])], -np.inf, 0.0) for i in range(s * groups, (s + 1) * groups)
        ]
    for g in range(groups):
        rows.append(([n + s * groups + g for s in range(stages)], [1.0] * stages, 0.0, float(room[g])))
    for i in range(pairs):
        rows += [([k + i, n + i], [1.0, -1.0], -np.inf, 0.0), ([k + i, n + i + groups], [1.0, -1.0], -np.inf, 0.0)]
    at = [(r, c, x) for r, (columns, values, _, _) in enumerate(rows) for c, x in zip(columns, values, strict=True)]
    r, c, x = (np.array(part) for part in zip(*at, strict=True))
    matrix = coo_matrix((x, (r, c)), shape=(len(rows), count)).tocsr()
    upper = np.full(count, float(stage_nodes.max()))
    upper[u:k], upper[v:] = 1.0, 1.0
    limits = LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows])
    integral = np.ones(count)
    integral[k:v] = 0  # follow from the others
    found = milp(
        cost, constraints=limits, bounds=Bounds(np.zeros(count), upper), integrality=integral,
        options={"time_limit": SOLVER_LIMIT_S, "node_limit": SOLVER_NODES, "mip_rel_gap": 1e-4},
    )  # fmt: skip
    if found.x is None:
        return None
    solved: Ints = np.rint(found.x[n : n + cells]).astype(np.int64).reshape(stages, groups)
    return solved
