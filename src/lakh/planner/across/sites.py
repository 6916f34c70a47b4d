"""Sites and the links between them, as data: what a sites file contains, and the network that follows from it.

A link is a fibre route with a bandwidth in each direction. Sites without a direct link reach each other through other
sites, on the path with the least delay.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lakh import config
from lakh.errors import ConfigError, UserError
from lakh.planner.catalogue import DATA
from lakh.planner.cost.prices import cluster_price
from lakh.planner.fabric.routing import ROUTINGS
from lakh.planner.fabric.transport import TRANSPORTS
from lakh.spec.cluster import Cluster, load_cluster

__all__ = ["SECONDS_PER_MONTH", "NetworkChoices", "Site", "SiteLink", "SiteNetwork", "Sites", "load_sites"]

FIBRE_S_PER_KM = 5e-6
"""Light in glass: 200,000 km/s."""
SECONDS_PER_MONTH = 365.25 / 12 * 86400
MOST_SITES = 5
"""Placements grow faster than exponentially with the number of sites."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    name: str
    cluster: str
    """Cluster file, or the name of one that ships with lakh."""
    gpus: int
    """GPUs of the site that the job may use."""
    usd_per_gpu_hour: float | None = None
    """Default: the price book's."""

    def __post_init__(self) -> None:
        config.require_positive(self, "gpus")
        config.require(self, "usd_per_gpu_hour", lambda usd: usd >= 0, "is negative", "give US dollars")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteLink:
    between: tuple[str, str]
    distance_km: float
    bandwidth_Tbps: float | None = None
    """Terabits per second in each direction."""
    oversubscription: float | None = None
    """Instead of a bandwidth: the NICs of the smaller site over the link."""
    equipment_us: float = 20.0
    """Switches, routers and transponders, one way."""
    loss: float = 0.0
    """Probability that a packet is lost."""
    wavelength_Gbps: float = 800.0
    usd_per_wavelength_month: float = 0.0
    """Of each wavelength that is added."""

    def __post_init__(self) -> None:
        where = f"links.{'-'.join(self.between)}"
        if (self.bandwidth_Tbps is None) == (self.oversubscription is None):
            raise ConfigError(where, "needs one of bandwidth_Tbps and oversubscription", "give exactly one")
        amounts = ("bandwidth_Tbps", "oversubscription", "wavelength_Gbps")
        config.require(self, amounts, lambda value: value > 0, "is not positive", "give a positive number")
        config.require_not_negative(self, "distance_km", "equipment_us", "usd_per_wavelength_month")
        config.require(self, "loss", lambda share: 0 <= share < 0.1, "is not below 0.1", "give e.g. 1e-5")

    @property
    def delay_s(self) -> float:
        """One way."""
        return self.distance_km * FIBRE_S_PER_KM + self.equipment_us * 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkChoices:
    """What the operators of the sites can configure. The first of each is today's setting."""

    routing: tuple[str, ...] = ("ecmp", "e-ecmp", "flowlet", "te", "spray")
    qps: tuple[int, ...] = (1, 4, 16, 32)
    transport: tuple[str, ...] = ("go-back-n", "selective-repeat", "erasure-coding")
    extra_wavelengths: tuple[int, ...] = (0,)
    """Wavelengths added to every link in use."""

    def __post_init__(self) -> None:
        for name, known in (("routing", ROUTINGS), ("transport", TRANSPORTS)):
            for value in getattr(self, name):
                if value not in known:
                    raise ConfigError(f"network.{name}", f"{value!r} is not known", f"choose from: {', '.join(known)}")
        for name, least in (("qps", 1), ("extra_wavelengths", 0)):
            values = getattr(self, name)
            if not values or min(values) < least:
                raise ConfigError(f"network.{name}", f"{list(values)} has a number below {least}", "give such numbers")
        if not (self.routing and self.transport):
            raise ConfigError("network", "has an empty list", "name at least one routing and one transport")


@dataclass(frozen=True, kw_only=True)
class Sites:
    name: str
    sites: tuple[Site, ...]
    links: tuple[SiteLink, ...] = ()
    network: NetworkChoices = field(default_factory=NetworkChoices)

    def __post_init__(self) -> None:
        names = [site.name for site in self.sites]
        if not 1 <= len(names) <= MOST_SITES:
            raise ConfigError("sites", f"has {len(names)} sites", f"give 1 to {MOST_SITES}")
        if len(set(names)) < len(names):
            raise ConfigError("sites", "has two sites of one name", "name each site once")
        seen: set[frozenset[str]] = set()
        for link in self.links:
            ends = frozenset(link.between)
            if len(ends) < 2 or not ends <= set(names):
                raise ConfigError("links.between", f"{list(link.between)} are not two sites", f"sites: {names}")
            if ends in seen:
                raise ConfigError("links.between", f"{list(link.between)} has two links", "add their bandwidths")
            seen.add(ends)

    def without(self, *names: str) -> Sites:
        """The same without some sites, and without their links."""
        sites = tuple(site for site in self.sites if site.name not in names)
        return replace(self, sites=sites, links=tuple(k for k in self.links if not set(k.between) & set(names)))


def load_sites(name: str | Path) -> Sites:
    """Read a sites file, or one that ships with lakh by its bare name."""
    path = Path(name)
    if not path.exists() and path.name == str(name):
        shipped = DATA / "sites" / f"{path.stem}.toml"
        if not shipped.exists():
            known = ", ".join(sorted(file.stem for file in shipped.parent.glob("*.toml")))
            raise UserError(f"sites {name}", "no such file", f"give a path, or one of: {known}")
        path = shipped
    return config.load(Sites, path)


class SiteNetwork:
    """The clusters of the sites, and for every pair of sites the links on its path and its delay."""

    def __init__(self, sites: Sites, prices: str | None = None) -> None:
        self.file = sites
        self.names = [site.name for site in sites.sites]
        self.gpus = [site.gpus for site in sites.sites]
        loaded = [load_cluster(site.cluster) for site in sites.sites]
        self.clusters = [_trimmed(c, s) for c, s in zip(loaded, sites.sites, strict=True)]
        self.usd_per_gpu_s = [
            (cluster_price(c, prices, free_if_unknown=True).usd if s.usd_per_gpu_hour is None else s.usd_per_gpu_hour)
            / 3600
            for c, s in zip(loaded, sites.sites, strict=True)
        ]
        self.nic_Bps = [c.tiers[min(1, len(c.tiers) - 1)].bandwidth_GBps * 1e9 for c in self.clusters]
        self.links = sites.links
        self.capacity_Bps = np.array([self._capacity(link) for link in sites.links])
        self.delay_s, self.paths = self._paths()

    def _capacity(self, link: SiteLink) -> float:
        if link.bandwidth_Tbps is not None:
            return link.bandwidth_Tbps * 1e12 / 8
        assert link.oversubscription is not None
        ends = [self.names.index(name) for name in link.between]
        return min(self.gpus[i] * self.nic_Bps[i] for i in ends) / link.oversubscription

    def _paths(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], tuple[int, ...]]]:
        """Shortest paths by delay (Floyd and Warshall), as numbers of links."""
        count = len(self.names)
        delay = {(i, i): 0.0 for i in range(count)}
        paths: dict[tuple[int, int], tuple[int, ...]] = {(i, i): () for i in range(count)}
        for number, link in enumerate(self.links):
            a, b = (self.names.index(name) for name in link.between)
            delay[a, b] = delay[b, a] = link.delay_s
            paths[a, b] = paths[b, a] = (number,)
        for via, a, b in itertools.product(range(count), repeat=3):
            if (a, via) in delay and (via, b) in delay:
                other = delay[a, via] + delay[via, b]
                if other < delay.get((a, b), np.inf):
                    delay[a, b], paths[a, b] = other, paths[a, via] + paths[via, b]
        return delay, paths

    def directed(self, a: int, b: int) -> list[tuple[int, bool]]:
        """Links of the path from a to b, and whether each is crossed from its first end to its second."""
        found, here = [], self.names[a]
        for link in self.paths[a, b]:
            first, second = self.links[link].between
            found.append((link, here == first))
            here = second if here == first else first
        return found

    def connects(self, sites: tuple[int, ...]) -> bool:
        return all((a, b) in self.delay_s for a in sites for b in sites)


def _trimmed(cluster: Cluster, site: Site) -> Cluster:
    """The cluster with only as many groups of its outermost tier as the site uses."""
    if site.gpus > cluster.gpus:
        found = f"has {site.gpus:,} GPUs, its cluster {cluster.name} has {cluster.gpus:,}"
        raise ConfigError(f"sites.{site.name}", found, "give fewer GPUs, or another cluster")
    tiers = list(cluster.tiers)
    while len(tiers) > 1 and tiers[-2].size >= site.gpus:
        tiers.pop()
    inner = tiers[-2].size if len(tiers) > 1 else 1
    tiers[-1] = replace(tiers[-1], size=-(-site.gpus // inner) * inner)
    return replace(cluster, tiers=tuple(tiers))
