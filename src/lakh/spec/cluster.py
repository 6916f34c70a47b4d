"""A cluster: one kind of GPU in nested network tiers, as data with units in the names and a source for each number.

    [gpu]      what one accelerator can do
    [[tiers]]  from the innermost (a node) outwards; `size` counts the GPUs of one group of that tier

Bandwidth is per GPU and direction; with oversubscription k only 1/k of it remains when all GPUs of a tier communicate
across it at once. Files are in clusters/; a bare name such as "laptop" selects the file of that name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lakh import config
from lakh.errors import ConfigError, UserError
from lakh.spec.gpu import Gpu

__all__ = ["Cluster", "Tier", "load_cluster", "shared_file", "shared_files"]


FASTEST_NIC_GBps = 200.0
"""1.6 Tbit/s per GPU: twice the fastest NIC that ships (ConnectX-8, 800 Gbit/s)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    name: str
    """node, rack, zone, building, ..."""
    size: int
    """GPUs in one group of this tier."""
    bandwidth_GBps: float
    """Per GPU and direction, between GPUs of the same group."""
    latency_us: float
    """One way, for an empty message."""
    oversubscription: float = 1.0
    """1 is full bisection; 7 leaves a seventh when all GPUs communicate across this tier."""
    rails: bool = False
    """Rail-optimised leaves: GPU i of every node of the group is on leaf switch i."""
    uplinks: int | None = None
    """Links from one group to the tier above, each of a NIC's rate; by default what oversubscription leaves."""
    source: str = ""
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        config.require_positive(self, "size")
        config.require(self, "uplinks", lambda links: links >= 1, "is below 1", "give a number of links, or omit it")
        config.require(self, "bandwidth_GBps", lambda rate: rate > 0, "is not positive", "give GB/s per GPU")
        config.require_not_negative(self, "latency_us")
        config.require(self, "oversubscription", lambda k: k >= 1, "is below 1", "1 means full bisection")

    @property
    def bandwidth_Bps(self) -> float:
        """Per GPU and direction when all GPUs of the tier communicate across it."""
        return self.bandwidth_GBps * 1e9 / self.oversubscription

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    name: str
    """What people call it."""
    gpu: Gpu
    tiers: tuple[Tier, ...]
    """Network tiers from the innermost outwards."""
    storage_read_GBps: float | None = None
    """Read rate of storage, for all GPUs together: used to plan data loading."""
    storage_write_GBps: float | None = None
    """Write rate of storage, for all GPUs together: used to plan checkpoints."""

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ConfigError("tiers", "is empty", "describe at least the node as [[tiers]]")
        rates = ("storage_read_GBps", "storage_write_GBps")
        config.require(self, rates, lambda rate: rate > 0, "is not positive", "give a rate, or omit it")
        for tier in self.tiers[1:]:
            if tier.bandwidth_GBps > FASTEST_NIC_GBps:
                found = f"{tier.name} has {tier.bandwidth_GBps:g} GB/s per GPU, more than any NIC"
                todo = (
                    f"give gigabytes, not gigabits: {tier.bandwidth_GBps:g} Gbit/s are {tier.bandwidth_GBps / 8:g} GB/s"
                )
                raise ConfigError("tiers.bandwidth_GBps", found, todo)
        for inner, outer in pairwise(self.tiers):
            if outer.size % inner.size or outer.size <= inner.size:
                found = f"{outer.name} of {outer.size} GPUs is not a whole number of {inner.name} groups ({inner.size})"
                todo = "list tiers from the smallest to the largest, each a multiple of the one before"
                raise ConfigError("tiers", found, todo)

    @property
    def gpus(self) -> int:
        return self.tiers[-1].size

    @property
    def node_size(self) -> int:
        return self.tiers[0].size

    def tier_of(self, ranks: int) -> Tier:
        """The innermost tier that holds `ranks` neighbouring GPUs."""
        for tier in self.tiers:
            if ranks <= tier.size:
                return tier
        raise UserError(f"cluster {self.name}", f"has {self.gpus} GPUs, {ranks} were requested", "request fewer")


def load_cluster(name: str | Path) -> Cluster:
    """Read clusters/NAME.toml, or the file at that path."""
    return config.load(Cluster, shared_file("clusters", str(name), ".toml"))


def shared_file(folder: str, name: str, suffix: str) -> Path:
    """Find a file by its path, or by its bare name when it ships with lakh (clusters, recipes)."""
    if Path(name).exists():
        return Path(name)
    if Path(name).name == name:
        bare = name.removesuffix(suffix)
        for base in _shared_folders():
            path = base / folder / f"{bare}{suffix}"
            if path.exists():
                return path
        known = sorted(shared_files(folder, suffix))
        near = difflib.get_close_matches(bare, known, n=1)
        todo = f"give a path, or one of: {', '.join(known)}" if known else "give a path"
        raise UserError(f"{folder}/{bare}{suffix}", "no such file", f"did you mean {near[0]}?" if near else todo)
    raise UserError(name, "no such file", "check the path")


def shared_files(folder: str, suffix: str) -> dict[str, Path]:
    """The files of this kind that ship with lakh, by bare name."""
    return {path.stem: path for base in reversed(_shared_folders()) for path in (base / folder).glob(f"*{suffix}")}


def _shared_folders() -> list[Path]:
    """Folders that contain clusters/ and recipes/: the source checkout, or the installed package's share folder."""
    package = Path(__file__).resolve().parents[1]
    return [package.parents[1], package / "share"]
