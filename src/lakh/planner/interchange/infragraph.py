"""A cluster's network as an InfraGraph (github.com/Keysight/infragraph, model 2.4), and back.

The graph has a server with GPUs, NICs and an NVLink switch, and one kind of switch per stage of the fabric, wired as
fabric/topology.py numbers the links. Rates are of one link and direction. The latency between two GPUs is the sum over
the links on the way, so each link has half of what its stage adds. An InfraGraph says nothing about arithmetic: the
GPU of an imported cluster comes from another cluster file.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.planner.fabric.topology import FabricTopology, SwitchStage
from lakh.spec.cluster import Cluster, Tier
from lakh.spec.gpu import Gpu

__all__ = ["cluster_from_infragraph", "infragraph_of", "read_infragraph"]

SERVER, GPU, NIC, NVLINK_SWITCH, PORT, ASIC = "server", "xpu", "nic", "nvswitch", "port", "asic"
TIER_NAMES = ("rack", "zone", "cluster", "region")


def infragraph_of(cluster: Cluster) -> dict[str, Any]:
    """The graph as the data of an InfraGraph file."""
    topology = FabricTopology(cluster)
    node, leaf = cluster.tiers[0], topology.leaf
    links = [_link("nic", topology.nic_Bps, leaf.latency_s / 2, f"NIC of a GPU to its {leaf.name} switch")]
    latency_s = leaf.latency_s
    for stage in topology.stages:
        added = max(stage.latency_s - latency_s, 0.0) / 2
        links.append(_link(stage.tier, stage.link_Bps, added, f"{stage.below} switch to {stage.tier} switch"))
        latency_s = max(stage.latency_s, latency_s)
    leaves, leaf_switch = topology.num_gpus // topology.leaf_gpus, _switch_name(leaf.name)
    devices, instances = [_server(cluster)], [_instance(SERVER, SERVER, topology.num_gpus // node.size)]
    above = [*topology.stages, None]
    devices.append(_switch(leaf_switch, topology.leaf_gpus + _fan_out(None, above[0])))
    instances.append(_instance(leaf_switch, leaf_switch, leaves))
    for number, stage in enumerate(topology.stages):
        name, following = _switch_name(stage.tier), above[number + 1]
        groups = topology.num_groups(following) if following else 1
        ports = topology.num_groups(stage) // groups + _fan_out(stage, following)
        devices.append(_switch(name, ports))
        instances.append(_instance(name, name, groups * stage.num_paths))
    return {
        "name": cluster.name,
        "description": f"{topology.num_gpus:,} GPUs ({cluster.gpu.kind}); rates per direction",
        "devices": devices,
        "links": links,
        "instances": instances,
        "edges": [*_leaf_edges(topology), *_stage_edges(topology)],
    }


def _switch_name(tier: str) -> str:
    return f"{tier.replace(' ', '-')}-switch"


def _fan_out(stage: SwitchStage | None, following: SwitchStage | None) -> int:
    """Uplinks of one switch."""
    if following is None:
        return 0
    return following.num_paths // (stage.num_paths if stage else 1)


def _server(cluster: Cluster) -> dict[str, Any]:
    node = cluster.tiers[0]
    return {
        "name": SERVER,
        "description": f"server with {node.size} x {cluster.gpu.kind}",
        "components": [
            _component(GPU, "xpu", node.size),
            _component(NIC, "nic", node.size),
            _component(NVLINK_SWITCH, "switch", 1),
        ],
        "links": [
            _link("node", node.bandwidth_Bps, node.latency_s / 2, "GPU to the switch of its node"),
            {"name": "host", "description": "GPU to its NIC"},
        ],
        "edges": [
            _edge({"component": GPU}, {"component": NVLINK_SWITCH}, "many2many", "node"),
            _edge({"component": GPU}, {"component": NIC}, "one2one", "host"),
        ],
    }


def _switch(name: str, ports: int) -> dict[str, Any]:
    edge = _edge({"component": ASIC}, {"component": PORT}, "many2many", "inside")
    components = [_component(ASIC, "switch", 1), _component(PORT, "port", ports)]
    return {"name": name, "components": components, "links": [{"name": "inside"}], "edges": [edge]}


def _component(name: str, choice: str, count: int) -> dict[str, Any]:
    return {"name": name, "count": count, "choice": choice, choice: {}}


def _instance(name: str, device: str, count: int) -> dict[str, Any]:
    return {"name": name, "device": device, "count": count}


def _link(name: str, rate_Bps: float, latency_s: float, description: str) -> dict[str, Any]:
    bandwidth = {"choice": "gigabits_per_second", "gigabits_per_second": rate_Bps * 8 / 1e9}
    physical = {"bandwidth": bandwidth, "latency": {"choice": "us", "us": latency_s * 1e6}}
    return {"name": name, "description": description, "physical": physical}


def _edge(ep1: dict[str, str], ep2: dict[str, str], scheme: str, link: str) -> dict[str, Any]:
    return {"ep1": ep1, "ep2": ep2, "scheme": scheme, "link": link}


def _end(instance: str, first: int, count: int, component: str, part: int, parts: int) -> dict[str, str]:
    return {"instance": f"{instance}[{first}:{first + count}]", "component": f"{component}[{part}:{part + parts}]"}


def _leaf_edges(topology: FabricTopology) -> Iterator[dict[str, Any]]:
    """Servers and their leaf switches; with rails NIC i of every server of a group is on switch i."""
    switch, gpus, node = _switch_name(topology.leaf.name), topology.leaf_gpus, topology.node.size
    for number in range(topology.num_gpus // gpus):
        ports = _end(switch, number, 1, PORT, 0, gpus)
        if topology.leaf.rails:
            group, rail = divmod(number, node)
            yield _edge(_end(SERVER, group * gpus, gpus, NIC, rail, 1), ports, "one2one", "nic")
        else:
            servers = gpus // node
            yield _edge(_end(SERVER, number * servers, servers, NIC, 0, node), ports, "one2one", "nic")


def _stage_edges(topology: FabricTopology) -> Iterator[dict[str, Any]]:
    """Uplink l of a group goes to switch l of the stage above; a switch of stage k has several uplinks."""
    below, lanes = _switch_name(topology.leaf.name), 1
    down_ports = topology.leaf_gpus
    for number, stage in enumerate(topology.stages):
        following = topology.stages[number + 1] if number + 1 < len(topology.stages) else None
        switch, groups = _switch_name(stage.tier), topology.num_groups(stage)
        per_group = groups // topology.num_groups(following) if following else groups
        for group in range(groups):
            outer, inner = divmod(group, per_group)
            first = outer * stage.num_paths
            if lanes == 1:  # a leaf: one switch with all uplinks
                lower = _end(below, group, 1, PORT, down_ports, stage.num_paths)
                yield _edge(lower, _end(switch, first, stage.num_paths, PORT, inner, 1), "one2one", stage.tier)
                continue
            for uplink in range(stage.num_paths // lanes):
                lower = _end(below, group * lanes, lanes, PORT, down_ports + uplink, 1)
                upper = _end(switch, first + uplink * lanes, lanes, PORT, inner, 1)
                yield _edge(lower, upper, "one2one", stage.tier)
        below, lanes, down_ports = switch, stage.num_paths, per_group


# --- import ---


def read_infragraph(path: str | Path) -> dict[str, Any]:
    """The data of an InfraGraph file: JSON, or YAML if PyYAML is installed."""
    text = storage.read_bytes(path).decode("utf-8", errors="replace")
    try:
        data = json.loads(text)
    except ValueError:
        data = _yaml(text, str(path))
    if isinstance(data, dict) and isinstance(data.get("infrastructure"), dict):
        data = data["infrastructure"]
    needed = ("devices", "links", "instances", "edges")
    if not isinstance(data, dict) or any(not isinstance(data.get(name), list) for name in needed):
        raise DataError(str(path), "is no InfraGraph", f"give a file with the lists {', '.join(needed)}")
    return data


def _yaml(text: str, path: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UserError(path, "is YAML, which needs the package PyYAML", "pip install pyyaml, or give JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(path, f"is neither JSON nor YAML ({error})", "give an InfraGraph file") from None


def cluster_from_infragraph(data: dict[str, Any], gpu: Gpu, origin: str = "the InfraGraph") -> Cluster:
    """The tiers of a graph: servers that switches of the first stage connect, of the first two, and so on."""
    try:
        return _Graph(data, origin).cluster(gpu)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(origin, f"is no InfraGraph of servers and switches ({error!r})", "fix the file") from None


class _Graph:
    """Devices of a graph as numbers, and the cables between them."""

    def __init__(self, data: dict[str, Any], origin: str) -> None:
        self.origin, self.name = origin, str(data.get("name") or "infragraph")
        self.devices = {device["name"]: device for device in data["devices"]}
        self.instances = {one["name"]: one for one in data["instances"]}
        self.links = {link["name"]: link for link in data["links"]}
        servers = [
            one for one in self.instances.values() if self._components(one["device"], "xpu")
        ]  # fmt: skip
        if len(servers) != 1:
            found = f"has {len(servers)} kinds of servers with xpu components"
            raise DataError(origin, found, "give a graph with one kind of server")
        self.server = servers[0]
        self.gpus_per_server = sum(c["count"] for c in self._components(self.server["device"], "xpu"))
        self.nics = [c["name"] for c in self._components(self.server["device"], "nic")]
        # (device, device) -> rate of the cables between them; latency of each link in use
        self.cables: dict[tuple[str, str], float] = defaultdict(float)
        self.latency_us: dict[tuple[str, str], float] = {}
        self.nic_Gbps: set[float] = set()
        self.nics_in_use: set[str] = set()
        for edge in data["edges"]:
            self._add_edge(edge)

    def _components(self, device: str, choice: str) -> list[dict[str, Any]]:
        return [one for one in self.devices[device]["components"] if one["choice"] == choice]

    def _add_edge(self, edge: dict[str, Any]) -> None:
        rate, latency = _physical(self.links[edge["link"]], self.origin)
        ends = [self._expand(edge[name]) for name in ("ep1", "ep2")]
        scheme = edge.get("scheme", "one2one")
        if scheme == "many2many":
            pairs = [(a, b) for a in ends[0] for b in ends[1]]
        elif scheme == "one2one":
            pairs = list(zip(*ends, strict=False))
        else:
            raise DataError(self.origin, f"has an edge with the scheme {scheme}", "use one2one or many2many")
        for (a, part), (b, other) in pairs:
            low, high = sorted((a, b))
            self.cables[low, high] += rate
            self.latency_us[low, high] = latency
            for device, component in ((a, part), (b, other)):
                if self._instance_of(device) == self.server["name"]:
                    self.nic_Gbps.add(rate)
                    self.nics_in_use.add(f"{device}.{component}")

    @staticmethod
    def _instance_of(device: str) -> str:
        return device.rpartition(".")[0]

    def _expand(self, end: dict[str, str]) -> list[tuple[str, str]]:
        name, numbers = _slice(end["instance"])
        one = self.instances[name]
        part, parts = _slice(end["component"].split(".")[0])
        counts = {c["name"]: c["count"] for c in self.devices[one["device"]]["components"]}
        devices = [f"{name}.{i}" for i in range(one["count"])[numbers]]
        return [(device, f"{part}.{i}") for device in devices for i in range(counts[part])[parts]]

    def cluster(self, gpu: Gpu) -> Cluster:
        prefix = self.server["name"]
        servers = [f"{prefix}.{i}" for i in range(self.server["count"])]
        if len(self.nic_Gbps) != 1:
            raise DataError(self.origin, f"has NICs of {sorted(self.nic_Gbps)} Gbit/s", "give servers with equal NICs")
        nic_GBps = next(iter(self.nic_Gbps)) / 8 * len(self.nics_in_use) / (len(servers) * self.gpus_per_server)
        levels = self._levels(set(servers))
        tiers = [self._node_tier()]
        latency_us, below = 0.0, {server: {server} for server in servers}
        group_of = {server: server for server in servers}
        rails = False
        for number, (low, high) in enumerate(pairwise(levels)):
            between = [(a, b) for a, b in self.cables if {a, b} & low and {a, b} & high]
            latency_us += 2 * max(self.latency_us[pair] for pair in between)
            if number == 0:
                upper: Counter[str] = Counter(a if a in low else b for a, b in between)
                rails = min(upper.values()) > 1
            inner = len(next(iter(below.values())))
            group_of, groups = self._joined(servers, levels[1 : number + 2], group_of)
            uplinks = sum(self.cables[pair] for pair in between)  # Gbit/s of all groups below
            wanted = len(servers) * self.gpus_per_server * nic_GBps * 8
            over = 1.0 if number == 0 else max(wanted / uplinks, 1.0)
            sizes = {len(one) for one in groups.values()}
            if len(sizes) != 1:
                raise DataError(self.origin, f"has groups of {sorted(sizes)} servers", "give a regular network")
            size = sizes.pop()
            if size > inner or number == 0:
                tiers.append(
                    Tier(name=TIER_NAMES[min(number, 3)], size=size * self.gpus_per_server, bandwidth_GBps=nic_GBps,
                         latency_us=latency_us, oversubscription=over, rails=rails and number == 0,
                         source=f"InfraGraph {self.name}")
                )  # fmt: skip
            below = groups
        return Cluster(name=self.name, gpu=gpu, tiers=tuple(tiers))

    def _node_tier(self) -> Tier:
        device = self.devices[self.server["device"]]
        links = {link["name"]: link for link in device.get("links", [])}
        gpu_names = {one["name"] for one in self._components(self.server["device"], "xpu")}
        best = (0.0, 0.0)
        for edge in device.get("edges", []):
            ends = {_slice(edge[name]["component"])[0] for name in ("ep1", "ep2")}
            states_rate = (links[edge["link"]].get("physical") or {}).get("bandwidth")
            if ends & gpu_names and states_rate:
                best = max(best, _physical(links[edge["link"]], self.origin))
        if not best[0]:
            raise DataError(self.origin, "states no bandwidth between the GPUs of a server", "add it to its link")
        return Tier(
            name="node", size=self.gpus_per_server, bandwidth_GBps=best[0] / 8, latency_us=2 * best[1],
            source=f"InfraGraph {self.name}",
        )  # fmt: skip

    def _levels(self, servers: set[str]) -> list[set[str]]:
        """Servers, their switches, the switches above these, ..."""
        neighbours: dict[str, set[str]] = defaultdict(set)
        for a, b in self.cables:
            neighbours[a].add(b)
            neighbours[b].add(a)
        levels, seen = [servers], set(servers)
        while True:
            following = set().union(*(neighbours[device] for device in levels[-1])) - seen
            if not following:
                return levels
            levels.append(following)
            seen |= following

    def _joined(
        self, servers: list[str], levels: list[set[str]], group_of: dict[str, str]
    ) -> tuple[dict[str, str], dict[str, set[str]]]:
        """Groups of servers that the switches of these levels connect (union-find)."""
        allowed = set(servers).union(*levels)
        parent = {device: device for device in allowed}

        def root(device: str) -> str:
            while parent[device] != device:
                parent[device] = parent[parent[device]]
                device = parent[device]
            return device

        for a, b in self.cables:
            if a in allowed and b in allowed:
                parent[root(a)] = root(b)
        groups: dict[str, set[str]] = defaultdict(set)
        for server in servers:
            groups[root(server)].add(server)
        return {server: root(server) for server in group_of}, groups


def _slice(text: str) -> tuple[str, slice]:
    """A name with indexes in the notation of Python: nic, nic[3], nic[0:8]."""
    found = re.fullmatch(r"([^\[\]]+)(?:\[(\d*)(:?)(\d*)\])?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a name with indexes")
    name, first, colon, last = found.groups()
    if first and not colon:
        return name, slice(int(first), int(first) + 1)
    return name, slice(int(first) if first else None, int(last) if last else None)


def _physical(link: dict[str, Any], origin: str) -> tuple[float, float]:
    """Gbit/s and microseconds of a link."""
    physical = link.get("physical") or {}
    bandwidth, latency = physical.get("bandwidth") or {}, physical.get("latency") or {}
    if "gigabits_per_second" in bandwidth:
        rate = float(bandwidth["gigabits_per_second"])
    elif "gigabytes_per_second" in bandwidth:
        rate = 8 * float(bandwidth["gigabytes_per_second"])
    else:
        raise DataError(origin, f"the link {link['name']} states no rate in bits or bytes", "add its bandwidth")
    units = {"ms": 1e3, "us": 1.0, "ns": 1e-3}
    return rate, sum(float(latency[unit]) * scale for unit, scale in units.items() if unit in latency)
