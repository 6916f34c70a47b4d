"""Schedules of one rank between hosts, in the form that the native core takes, each with the reason for its choice.

Built when an operation of a size is first called, and kept. Asks `selection` which algorithm and `spec.collectives` for
its steps. Knows no group and no network: the topology and what its links carry are given, the same on all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakh.c3 import native
from lakh.c3.selection import DEFAULT_LINKS, Choice, choose_all_reduce, choose_spreading, fastest_first
from lakh.c3.topology import Link, Topology
from lakh.spec import collectives
from lakh.spec.collectives import Schedule

__all__ = ["Plan", "Plans"]

PLANS_KEPT = 256


@dataclass
class Plan:
    """A schedule in the form that the native core takes, and why it was chosen."""

    schedule: Schedule
    steps: Any
    reason: str


class Plans:
    """Of one rank of a topology. `algorithm` overrules the choice, in experiments."""

    def __init__(self, rank: int, topology: Topology, links: Mapping[str, Link] | None = None) -> None:
        self.rank, self.topology, self.links = rank, topology, links or {}
        self.algorithm: str | None = None
        self._kept: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()

    def know(self, topology: Topology, links: Mapping[str, Link]) -> None:
        """Choose by these from now on."""
        self.topology, self.links = topology, links
        self._kept.clear()

    def plan(
        self,
        operation: str,
        count: int,
        width: int,
        root: int = 0,
        splits: Sequence[int] | None = None,
        codec: str = "none",
    ) -> Plan:
        key = (operation, count, width, root, tuple(splits or ()), codec, self.algorithm)
        if key not in self._kept:
            schedule, reason = self._schedule(operation, count, width, root, splits, codec)
            self._kept[key] = Plan(schedule, _native_steps(schedule), reason)
            if len(self._kept) > PLANS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def choose(self, count: int, width: int, codec: str = "none") -> Choice:
        """How an all_reduce goes."""
        if self.algorithm is not None:
            return Choice(self.algorithm, float("nan"), "asked for")
        return choose_all_reduce(self.topology, count, width, links=self.links, codec=codec)

    def _schedule(
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
        if count == 0:  # no data, and still everybody learns whether all called the same
            return collectives.barrier(rank, size), "no elements: ranks only hear of each other"
        if operation == "all_reduce":
            choice = self.choose(count, width, codec)
            made = collectives.all_reduce(
                choice.algorithm,
                rank,
                size,
                count,
                places=self.topology.tiers(),
                codec=codec,
                rates=choice.rates,
                order=choice.order,
            )
            return made, choice.reason
        if operation in ("all_gather", "reduce_scatter"):
            choice = choose_spreading(self.topology, asked=self.algorithm)
            make_one = collectives.all_gather if operation == "all_gather" else collectives.reduce_scatter
            hosts = [(host,) for host in self.topology.hosts]
            return make_one(choice.algorithm, rank, size, count, places=hosts), choice.reason
        if operation in ("broadcast", "reduce"):
            tree = collectives.broadcast if operation == "broadcast" else collectives.reduce
            order = fastest_first(self.topology, self.links)
            slow = self.topology.slow_hosts({**DEFAULT_LINKS, **self.topology.links, **self.links})
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
