"""A cache of schedules between hosts in the native core's format, each with the reason for its algorithm.

A schedule is built on the first call of an operation with a given size. `selection` chooses the algorithm and
`spec.collectives` provides its steps. The topology and the link speeds are arguments, equal on all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakh.c3 import native
from lakh.c3.selection import DEFAULT_LINKS, AlgorithmChoice, choose_all_reduce, choose_gather, fastest_first
from lakh.c3.topology import Link, Topology
from lakh.spec import collectives
from lakh.spec.schedule import Schedule

__all__ = ["CachedSchedule", "ScheduleCache"]

MAX_CACHED = 256


@dataclass
class CachedSchedule:
    schedule: Schedule
    steps: Any
    """The steps as a ctypes array."""
    reason: str
    """Why this algorithm was chosen."""


class ScheduleCache:
    """Schedules of one rank of a topology. `algorithm` overrides the selection, for experiments."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank, self.topology = rank, topology
        self.links: Mapping[str, Link] = {}
        self.algorithm: str | None = None
        self._cached: OrderedDict[tuple[Any, ...], CachedSchedule] = OrderedDict()

    def set_network(self, topology: Topology, links: Mapping[str, Link]) -> None:
        """Select algorithms by these from now on."""
        self.topology, self.links = topology, links
        self._cached.clear()

    def get(
        self,
        operation: str,
        count: int,
        width: int,
        root: int = 0,
        splits: Sequence[int] | None = None,
        codec: str = "none",
    ) -> CachedSchedule:
        key = (operation, count, width, root, tuple(splits or ()), codec, self.algorithm)
        if key not in self._cached:
            schedule, reason = self._build(operation, count, width, root, splits, codec)
            self._cached[key] = CachedSchedule(schedule, _native_steps(schedule), reason)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return self._cached[key]

    def choose_all_reduce(self, count: int, width: int, codec: str = "none") -> AlgorithmChoice:
        if self.algorithm is not None:
            return AlgorithmChoice(self.algorithm, float("nan"), "requested")
        return choose_all_reduce(self.topology, count, width, links=self.links, codec=codec)

    def _build(
        self, operation: str, count: int, width: int, root: int, splits: Sequence[int] | None, codec: str
    ) -> tuple[Schedule, str]:
        rank, size = self.rank, self.topology.size
        if operation == "all_to_all":
            assert splits is not None
            sends = [splits[r + 1] - splits[r] for r in range(size)]
            receives = [splits[size + 2 + r] - splits[size + 1 + r] for r in range(size)]
            return collectives.all_to_all(rank, size, sends, receives), "one stage"
        if operation == "barrier":
            return collectives.barrier(rank, size), "dissemination"
        if count == 0:  # no data, but the ranks still check that all call the same operation
            return collectives.barrier(rank, size), "no elements: only a barrier"
        if operation == "all_reduce":
            choice = self.choose_all_reduce(count, width, codec)
            schedule = collectives.all_reduce(
                choice.algorithm,
                rank,
                size,
                count,
                places=self.topology.tiers(),
                codec=codec,
                rates=choice.rates,
                order=choice.order,
            )
            return schedule, choice.reason
        if operation in ("all_gather", "reduce_scatter"):
            choice = choose_gather(self.topology, requested=self.algorithm)
            build = collectives.all_gather if operation == "all_gather" else collectives.reduce_scatter
            hosts = [(host,) for host in self.topology.hosts]
            return build(choice.algorithm, rank, size, count, places=hosts), choice.reason
        if operation in ("broadcast", "reduce"):
            tree = collectives.broadcast if operation == "broadcast" else collectives.reduce
            order = fastest_first(self.topology, self.links)
            slow = self.topology.describe_host_rates({**DEFAULT_LINKS, **self.topology.links, **self.links})
            why = "a tree" if order is None else f"a tree whose leaves are the slowest hosts: {slow}"
            return tree(rank, size, count, root, order), why
        one_stage = collectives.gather if operation == "gather" else collectives.scatter
        return one_stage(rank, size, count, root), "one stage to or from the root"


def _native_steps(schedule: Schedule) -> Any:
    return (native.NativeStep * max(1, len(schedule.steps)))(
        *[
            native.NativeStep(
                s.stage, int(s.kind), s.peer, int(s.src), int(s.dst), s.fan, s.src_offset, s.dst_offset, s.count
            )
            for s in schedule.steps
        ]
    )
