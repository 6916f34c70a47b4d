"""Who sends how much to whom: the flows of collectives, as phases that follow one another.

Large collectives come from closed forms, vectorised over 100,000 GPUs. `schedule_phases` reads the same phases from
the schedules of `spec.collectives` that c3 executes, for up to some hundred ranks; a test compares the two.

A ring between nodes has one channel per NIC, as NCCL builds it: GPU i of a node sends to GPU i of the next node, and
each channel carries an equal part of the buffer. Inside the node the parts travel over NVLink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lakh.errors import UserError
from lakh.planner.fabric.topology import Ints
from lakh.spec.schedule import Schedule, StepKind

__all__ = ["COLLECTIVES", "Phase", "collective_phases", "node_order", "schedule_phases"]

COLLECTIVES = ("ring", "halving-doubling", "all-to-all", "send")
MOST_SCHEDULE_RANKS = 512


@dataclass(frozen=True)
class Phase:
    """Flows that run at the same time."""

    sources: Ints
    targets: Ints
    size_bytes: float
    """Sent by each flow."""
    repeats: int = 1
    """Times that the phase is repeated, one after another."""


def node_order(num_nodes: int, order: str, seed: int) -> Ints:
    """Nodes in the order of the ring."""
    if order == "rack":
        return np.arange(num_nodes)
    return np.random.default_rng(seed).permutation(num_nodes)


def collective_phases(
    collective: str, nodes: Ints, node_gpus: int, size_bytes: float, *, channels: int | None = None
) -> list[Phase]:
    """Phases of a collective over whole nodes, listed in its order.

    ring              all-reduce: 2 (N - 1) steps of 1/N of each channel's part to the next node
    halving-doubling  all-reduce: log2(N) exchanges of a half, a quarter, ... and the same backwards; N a power of two
    all-to-all        every GPU sends an equal part to every node, in N - 1 shifts
    send              every GPU sends the buffer to the next node once, as pipeline stages do
    """
    num, channels = len(nodes), channels or node_gpus
    if num == 1:
        gpus = nodes[0] * node_gpus + np.arange(node_gpus)
        ring = Phase(gpus, np.roll(gpus, -1), size_bytes / node_gpus, 2 * (node_gpus - 1))
        return [ring] if node_gpus > 1 else []
    lanes = np.arange(channels)
    part = size_bytes / channels  # of one channel

    def between(targets: Ints, size: float, repeats: int = 1) -> Phase:
        sources, targets = ((side[:, None] * node_gpus + lanes).ravel() for side in (nodes, targets))
        return Phase(sources, targets, size, repeats)

    following = np.roll(nodes, -1)
    if collective == "ring":
        return [between(following, part / num, 2 * (num - 1))]
    if collective == "send":
        return [between(following, size_bytes)]
    if collective == "all-to-all":
        shifts = _some_shifts(num)
        total = (num - 1) / len(shifts)  # each shift stands for this many
        return [between(np.roll(nodes, -shift), size_bytes / num * total) for shift in shifts]
    if num & (num - 1):
        raise UserError("--collective halving-doubling", f"{num} nodes are not a power of two", "choose ring")
    index, phases = np.arange(num), []
    distance, size = num // 2, part / 2
    while distance:
        phases.append(between(nodes[index ^ distance], size, 2))  # once while reducing, once while gathering
        distance, size = distance // 2, size / 2
    return phases


MOST_SHIFTS = 16


def _some_shifts(num: int) -> list[int]:
    """All shifts of an all-to-all, or MOST_SHIFTS of them spread evenly: neighbouring shifts load the same cuts."""
    if num - 1 <= MOST_SHIFTS:
        return list(range(1, num))
    return sorted({round(1 + k * (num - 2) / (MOST_SHIFTS - 1)) for k in range(MOST_SHIFTS)})


def schedule_phases(schedule_of: Callable[[int], Schedule], gpus: Sequence[int], width: int) -> list[Phase]:
    """Phases of any schedule of `spec`; rank r runs on gpus[r], an element has `width` bytes.

    Flows of a stage with different sizes become phases of one size each that run one after another.
    """
    if len(gpus) > MOST_SCHEDULE_RANKS:
        found = f"has {len(gpus)} ranks: a schedule lists every step of every rank"
        raise UserError("a fabric simulation of a schedule", found, f"use at most {MOST_SCHEDULE_RANKS} ranks")
    sends: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(len(gpus)):
        for step in schedule_of(rank).steps:
            if step.kind == StepKind.SEND:
                sends.setdefault((step.stage, step.count), []).append((gpus[rank], gpus[step.peer]))
    phases: list[Phase] = []
    for (_, count), pairs in sorted(sends.items()):
        sources, targets = np.array(sorted(pairs), dtype=np.int64).T
        phase, last = Phase(sources, targets, float(count * width)), phases[-1] if phases else None
        if last and last.size_bytes == phase.size_bytes and _same_flows(last, phase):
            phases[-1] = Phase(last.sources, last.targets, last.size_bytes, last.repeats + 1)
        else:
            phases.append(phase)
    return phases


def _same_flows(a: Phase, b: Phase) -> bool:
    return np.array_equal(a.sources, b.sources) and np.array_equal(a.targets, b.targets)
