"""The time of execution traces on a cluster: every node starts when its dependencies have ended.

A rank computes one node at a time, and another one on its host, and runs one collective at a time; sends take no time
of the sender. A collective starts when its last member has reached it: the n-th of a process group in the order of each
trace. Communication costs what timing/collectives.py says for the group at calibrated efficiency, without contention
with other traffic. Traces of real programs name dependencies that were not recorded: these do not hold a node back.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lakh.errors import DataError, UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.interchange.chakra_trace import TraceNode, read_trace
from lakh.planner.timing.collectives import Fabric, RankGroup, all_gather_s, all_reduce_s, all_to_all_s
from lakh.spec.cluster import Cluster

__all__ = ["GROUPS_FILE", "TraceReplay", "TraceSet", "read_traces", "replay_traces"]

GROUPS_FILE = "comm_groups.json"
COMPUTE, HOST, COMMUNICATION = "compute", "host", "communication"


@dataclass(frozen=True)
class TraceSet:
    ranks: list[list[TraceNode]]
    groups: dict[str, list[int]]

    def members(self, node: TraceNode) -> list[int]:
        """Ranks of a collective: of its process group, or all of them."""
        name = str(node.attributes.get("pg_name", ""))
        if not name:
            return list(range(len(self.ranks)))
        if name not in self.groups:
            found = f"node {node.id} has the process group {name!r}, which is not in {GROUPS_FILE}"
            raise DataError(f"trace {node.name!r}", found, f"add the group to {GROUPS_FILE}: name -> list of ranks")
        return self.groups[name]


def read_traces(folder: str | Path) -> TraceSet:
    """The files NAME.RANK.et of a folder, and its file of process groups if it has one."""
    folder = Path(folder)
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("*.et")):
        number = re.search(r"\.(\d+)\.et$", path.name)
        if number is None:
            raise UserError(str(path), "has no rank in its name", "name traces NAME.RANK.et, ranks from 0")
        if int(number[1]) in files:
            raise UserError(str(folder), f"has two traces of rank {int(number[1])}", "keep one job in a folder")
        files[int(number[1])] = path
    if not files or sorted(files) != list(range(len(files))):
        raise UserError(str(folder), f"has traces of the ranks {sorted(files)}", "give NAME.0.et and all others")
    groups: dict[str, list[int]] = {}
    path = folder / GROUPS_FILE
    if path.exists():
        try:
            groups = {str(name): [int(rank) for rank in ranks] for name, ranks in json.loads(path.read_bytes()).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(str(path), f"cannot be read ({error})", "map names of groups to lists of ranks") from None
        strangers = {rank for ranks in groups.values() for rank in ranks} - set(files)
        if strangers or not all(groups.values()):
            found = f"has ranks without a trace ({sorted(strangers)[:8]}) or empty groups"
            raise DataError(str(path), found, "fix the groups")
    return TraceSet([read_trace(files[rank]) for rank in range(len(files))], groups)


@dataclass(frozen=True)
class TraceReplay:
    seconds: float
    """Until the last node of the last rank ends."""
    slowest_rank: int
    compute_s: float
    """On the GPU, mean of the ranks."""
    host_s: float
    communication_s: float
    """Of collectives and receives, mean of the ranks; may overlap with computation."""
    nodes: dict[str, int]
    bytes_sent: dict[str, int]
    """Collective or send -> bytes of all ranks, as the traces state them."""
    absent_dependencies: int
    """On nodes that the traces do not contain."""

    @property
    def exposed_s(self) -> float:
        """Time of the step in which a rank does not compute, mean of the ranks."""
        return self.seconds - self.compute_s


@dataclass
class _Rank:
    waits: dict[int, int]
    """Node -> dependencies that have not ended."""
    free_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((COMPUTE, HOST, COMMUNICATION), 0.0))
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((COMPUTE, HOST, COMMUNICATION), 0.0))


class _Replay:
    def __init__(self, traces: TraceSet, cluster: Cluster) -> None:
        self.traces = traces
        self.nodes = [{node.id: node for node in rank} for rank in traces.ranks]
        self.children: list[dict[int, list[int]]] = [defaultdict(list) for _ in traces.ranks]
        self.ranks: list[_Rank] = []
        self.absent = 0  # dependencies on nodes that are not in the trace
        calibration, _ = calibration_for(cluster.gpu.family)
        self.fabric = Fabric(cluster, calibration.efficiency, len(traces.ranks))
        self.node_size = cluster.node_size
        self.group_costs: dict[tuple[int, ...], RankGroup] = {}
        self.turn: list[dict[int, tuple[tuple[int, ...], int]]] = []
        """By rank: collective -> its group, and its number in the group."""
        for rank, trace in enumerate(traces.ranks):
            self._add_rank(rank, trace)
        self.reached: dict[tuple[tuple[int, ...], int], list[tuple[int, int, float]]] = defaultdict(list)
        self.sent: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
        self.expected: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)
        self.events: list[tuple[float, int, int]] = []  # end, rank, node
        self.ended = 0
        self.end_s = [0.0] * len(traces.ranks)

    def _add_rank(self, rank: int, trace: list[TraceNode]) -> None:
        waits, turns, counts = {}, {}, Counter[tuple[int, ...]]()
        for node in trace:
            parents = set(node.depends_on) - {node.id}
            self.absent += len(parents - self.nodes[rank].keys())
            parents &= self.nodes[rank].keys()
            waits[node.id] = len(parents)
            for parent in parents:
                self.children[rank][parent].append(node.id)
            if node.type == "collective":
                members = tuple(self.traces.members(node))
                turns[node.id] = (members, counts[members])
                counts[members] += 1
        self.ranks.append(_Rank(waits))
        self.turn.append(turns)

    def run(self) -> None:
        for number, one in enumerate(self.ranks):
            for first, count in one.waits.items():
                if count == 0:
                    self._start(number, first, 0.0)
        while self.events:
            end_s, rank, node = heapq.heappop(self.events)
            self.ended += 1
            self.end_s[rank] = max(self.end_s[rank], end_s)
            for child in self.children[rank][node]:
                self.ranks[rank].waits[child] -= 1
                if self.ranks[rank].waits[child] == 0:
                    self._start(rank, child, end_s)
        total = sum(map(len, self.nodes))
        if self.ended < total:
            found = (
                f"{total - self.ended:,} of {total:,} nodes never start: a cycle, or a transfer without its other end"
            )
            raise DataError("the traces", found, "give the traces of all ranks of the job")

    def _start(self, rank: int, node_id: int, now_s: float) -> None:
        node = self.nodes[rank][node_id]
        if node.type == "send":
            key = (rank, node.integer("comm_dst"), node.integer("comm_tag"))
            took_s = self._send_s(node, rank, node.integer("comm_dst"))
            if self.expected[key]:
                receiver, since_s = self.expected[key].pop(0)
                self._receive(key[1], receiver, since_s, now_s + took_s, took_s)
            else:
                self.sent[key].append((now_s + took_s, took_s))
            heapq.heappush(self.events, (now_s, rank, node_id))
        elif node.type == "receive":
            key = (node.integer("comm_src"), rank, node.integer("comm_tag"))
            if self.sent[key]:
                self._receive(rank, node_id, now_s, *self.sent[key].pop(0))
            else:
                self.expected[key].append((node_id, now_s))
        elif node.type == "collective":
            members, number = self.turn[rank][node_id]
            arrived = self.reached[members, number]
            arrived.append((rank, node_id, max(now_s, self.ranks[rank].free_s[COMMUNICATION])))
            if len(arrived) == len(members):
                self._run_collective(node, members, arrived)
        else:
            stream = HOST if node.attributes.get("is_cpu_op") else COMPUTE
            self._compute(rank, node_id, stream, now_s, node.duration_us * 1e-6)

    def _compute(self, rank: int, node_id: int, stream: str, now_s: float, seconds: float) -> None:
        here = self.ranks[rank]
        end_s = max(now_s, here.free_s[stream]) + seconds
        here.free_s[stream] = end_s
        here.busy_s[stream] += seconds
        heapq.heappush(self.events, (end_s, rank, node_id))

    def _receive(self, rank: int, node_id: int, since_s: float, arrives_s: float, took_s: float) -> None:
        self.ranks[rank].busy_s[COMMUNICATION] += took_s
        heapq.heappush(self.events, (max(since_s, arrives_s), rank, node_id))

    def _run_collective(self, node: TraceNode, members: tuple[int, ...], arrived: list[tuple[int, int, float]]) -> None:
        start_s = max(max(when, self.ranks[rank].free_s[COMMUNICATION]) for rank, _, when in arrived)
        seconds = self._collective_s(node, members)
        for rank, node_id, _ in arrived:
            here = self.ranks[rank]
            here.free_s[COMMUNICATION] = start_s + seconds
            here.busy_s[COMMUNICATION] += seconds
            heapq.heappush(self.events, (start_s + seconds, rank, node_id))

    def _send_s(self, node: TraceNode, source: int, target: int) -> float:
        size = node.integer("comm_size") or node.integer("tensor_size")
        tier = self.fabric.node
        if source // self.node_size != target // self.node_size:
            outside = self.fabric.tiers
            tier = next((t for t in outside if source // t.size == target // t.size), outside[-1] if outside else tier)
            rate = tier.bandwidth_Bps * self.fabric.send_efficiency
            return float(size / rate + tier.latency_s + self.fabric.launch_s)
        return float(size / self.fabric.node_Bps + tier.latency_s + self.fabric.launch_s)

    def _collective_s(self, node: TraceNode, members: tuple[int, ...]) -> float:
        if len(members) < 2:
            return 0.0
        if members not in self.group_costs:
            stride = max(round((max(members) - min(members)) / (len(members) - 1)), 1)
            self.group_costs[members] = self.fabric.group(len(members), stride)
        group, size = self.group_costs[members], node.integer("comm_size")
        if node.collective == "barrier":
            return float(group.gather_latency_s)
        if node.collective == "all_reduce":
            return float(all_reduce_s(group, size))
        if node.collective == "all_to_all":
            return float(all_to_all_s(group, size))
        return float(all_gather_s(group, size))  # the others move a buffer once


def replay_traces(traces: TraceSet, cluster: Cluster) -> TraceReplay:
    if len(traces.ranks) > cluster.gpus:
        found = f"{len(traces.ranks):,} traces, the cluster {cluster.name} has {cluster.gpus:,} GPUs"
        raise UserError("lakh plan chakra import", found, "choose a larger cluster")
    replay = _Replay(traces, cluster)
    replay.run()
    count = len(traces.ranks)
    sent: Counter[str] = Counter()
    for node in (node for rank in traces.ranks for node in rank):
        if node.type in ("collective", "send"):
            kind: Any = node.collective if node.type == "collective" else "send"
            sent[kind] += node.integer("comm_size") or node.integer("tensor_size")
    seconds = max(replay.end_s)
    return TraceReplay(
        seconds=seconds,
        slowest_rank=replay.end_s.index(seconds),
        compute_s=sum(rank.busy_s[COMPUTE] for rank in replay.ranks) / count,
        host_s=sum(rank.busy_s[HOST] for rank in replay.ranks) / count,
        communication_s=sum(rank.busy_s[COMMUNICATION] for rank in replay.ranks) / count,
        nodes=dict(Counter(node.type for rank in traces.ranks for node in rank)),
        bytes_sent=dict(sent),
        absent_dependencies=replay.absent,
    )
