"""Emulated hosts and racks on one machine: network namespaces with rate-limited links. Requires root.

Each host of a topology file becomes a namespace with one interface, each rack a bridge in a namespace of switches.
Token buckets limit every host's link and every rack's trunk to the rates of [links.*]. Delays would need the kernel's
netem; if a topology has delays, or without root, the native core's traffic shaper emulates the links instead
(emulation.py), for c3 only.

Everything is removed at the end, also after an error. Names contain the process id; namespaces that a killed process
left are removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from lakh.c3.topology import Topology
from lakh.errors import UserError

__all__ = ["NetworkNamespaces", "find_stale", "unavailable_reason"]

COMMAND_TIMEOUT_S = 20
QUEUE_BYTES = 16 << 20
BURST_BYTES = 64 << 10


def unavailable_reason(topology: Topology) -> str:
    """Why this machine cannot create the namespaces; "" if it can."""
    if os.geteuid() != 0:
        return "creating network namespaces requires root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (apt-get install iproute2)"
    if any(link.delay_us for link in topology.links.values()):
        return "delays are emulated by the in-library traffic shaper"
    return ""


class NetworkNamespaces:
    """`with NetworkNamespaces(topology) as net:`; prefix a rank's command with `net.command(rank)`."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.tag = f"lakh{os.getpid()}"
        hosts = list(dict.fromkeys(topology.hosts))
        self.namespaces = {host: f"{self.tag}h{number}" for number, host in enumerate(hosts)}
        self.addresses = {host: f"10.213.0.{number + 1}" for number, host in enumerate(hosts)}
        self.switch = f"{self.tag}sw"

    def command(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[self.topology.hosts[rank]]]

    def address(self, rank: int) -> str:
        return self.addresses[self.topology.hosts[rank]]

    def __enter__(self) -> NetworkNamespaces:
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def disconnect(self, rank: int) -> None:
        """Take the link of a rank's host down."""
        _run("ip", "-n", self.namespaces[self.topology.hosts[rank]], "link", "set", "eth0", "down")

    def _create(self) -> None:
        for name in find_stale(_list(), lambda process: Path(f"/proc/{process}").exists()):
            _run("ip", "netns", "delete", name)
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "core", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "core", "up")
        racks: dict[str, str] = {}
        for host, place in zip(self.topology.hosts, self.topology.places, strict=True):
            rack = "/".join(reversed(place[1:]))
            if rack not in racks:
                racks[rack] = f"rack{len(racks)}"
                self._add_rack(racks[rack])
            if self.namespaces[host] not in _list():
                self._add_host(host, racks[rack])

    def _add_rack(self, bridge: str) -> None:
        _run("ip", "-n", self.switch, "link", "add", bridge, "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", bridge, "up")
        up, down = f"{bridge}u", f"{bridge}d"
        _run("ip", "-n", self.switch, "link", "add", up, "type", "veth", "peer", "name", down)
        for port, master in ((up, bridge), (down, "core")):
            _run("ip", "-n", self.switch, "link", "set", port, "master", master)
            _run("ip", "-n", self.switch, "link", "set", port, "up")
            self._limit(self.switch, port, self._rate("rack"))

    def _add_host(self, host: str, bridge: str) -> None:
        name = self.namespaces[host]
        port = f"p{name[len(self.tag) :]}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "-n", self.switch, "link", "set", port, "master", bridge)
        _run("ip", "-n", self.switch, "link", "set", port, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", interface, "up")
        self._limit(name, "eth0", self._rate("host", host))
        self._limit(self.switch, port, self._rate("host", host))

    def _rate(self, tier: str, group: str = "") -> float | None:
        link = self.topology.links.get(tier)
        return self.topology.host_rates.get(group, link.bytes_per_s if link is not None else None)

    def _limit(self, namespace: str, interface: str, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None:
            rate = ["rate", f"{int(bytes_per_s * 8)}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *rate)

    def _remove(self) -> None:
        for name in [*self.namespaces.values(), self.switch]:
            if name in _list():
                _run("ip", "netns", "delete", name)


def find_stale(namespaces: Iterable[str], is_alive: Callable[[int], bool]) -> list[str]:
    """Namespaces created by lakh processes that no longer exist."""
    ours = ((name, re.fullmatch(r"lakh(\d+)(?:h\d+|sw)", name)) for name in namespaces)
    return [name for name, found in ours if found is not None and not is_alive(int(found[1]))]


def _list() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(" ".join(command), f"did not finish in {COMMAND_TIMEOUT_S} s", "try again") from None
    if done.returncode:
        raise UserError(" ".join(command), done.stderr.strip()[:200], "check that network namespaces are permitted")
    return done.stdout
