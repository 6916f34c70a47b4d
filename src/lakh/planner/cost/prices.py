"""Price of a GPU-hour: rented, from a price book, or owned, from its parts. All amounts in US dollars.

The price book is data (data/prices.toml, or a user's file); every answer lists its assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lakh import config
from lakh.errors import UserError
from lakh.spec.cluster import Cluster

__all__ = ["GpuHour", "PriceBook", "cluster_price", "gpu_hour", "load_prices"]

DATA = Path(__file__).parents[1] / "data" / "prices.toml"
HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RentedPrice:
    usd_per_gpu_hour: float
    source: str

    def __post_init__(self) -> None:
        config.require(self, "usd_per_gpu_hour", lambda usd: usd >= 0, "is negative", "give an amount in US dollars")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedPrice:
    usd_per_gpu: float
    usd_network_per_gpu: float
    usd_host_and_storage_per_gpu: float
    depreciation_years: float
    usd_per_kWh: float
    power_overhead: float
    """Power of the facility over power of the machines (PUE)."""
    host_power_W_per_gpu: float
    """Host, NICs and switches."""
    staff_usd_per_gpu_year: float
    maintenance_share_per_year: float
    """Share of the purchase price."""
    utilisation: float
    """Share of hours in use; idle hours are charged to the used ones."""
    source: str

    def __post_init__(self) -> None:
        amounts = ("usd_per_gpu", "usd_per_kWh", "usd_network_per_gpu", "usd_host_and_storage_per_gpu")
        config.require(self, amounts, lambda usd: usd >= 0, "is negative", "give an amount in US dollars")
        config.require(self, "depreciation_years", lambda years: years > 0, "is not above 0", "give years of use")
        config.require(self, "power_overhead", lambda pue: pue >= 1, "is below 1", "give the PUE, 1 or more")
        config.require(self, "utilisation", lambda share: 0 < share <= 1, "is not a share", "choose above 0, up to 1")


@dataclass(frozen=True)
class GpuHour:
    """Price of one GPU for one hour, and the parts that add up to it."""

    usd: float
    parts: dict[str, float]
    assumptions: list[str]


@dataclass(frozen=True, kw_only=True)
class PriceBook:
    rented: dict[str, RentedPrice] = field(default_factory=dict)
    """By GPU family."""
    owned: OwnedPrice | None = None
    """Default: that of the shipped price book."""


@cache
def load_prices(path: str | Path | None = None) -> PriceBook:
    return config.load(PriceBook, path or DATA)


def cluster_price(
    cluster: Cluster, path: str | Path | None = None, *, owned: bool = False, free_if_unknown: bool = False
) -> GpuHour:
    """Price of the cluster's GPU, from the shipped price book or the one at `path`."""
    prices, gpu = load_prices(path), cluster.gpu
    if free_if_unknown and not owned and gpu.family not in prices.rented:
        return GpuHour(0.0, {}, [f"{gpu.kind} is not in the price book: counted as free"])
    return gpu_hour(prices, gpu.family, owned=owned, power_W=gpu.power_W)


def gpu_hour(prices: PriceBook, kind: str, *, owned: bool = False, power_W: float | None = None) -> GpuHour:
    if not owned:
        if kind not in prices.rented:
            known = ", ".join(prices.rented)
            raise UserError(f"price of {kind}", "is not in the price book", f"add [rented.{kind}]; known: {known}")
        price = prices.rented[kind]
        return GpuHour(price.usd_per_gpu_hour, {"rent": price.usd_per_gpu_hour}, [f"rented: {price.source}"])
    o = prices.owned or load_prices().owned
    assert o is not None
    capital = o.usd_per_gpu + o.usd_network_per_gpu + o.usd_host_and_storage_per_gpu
    per_hour = 1 / (HOURS_PER_YEAR * o.utilisation)
    kilowatt = ((power_W or 700.0) + o.host_power_W_per_gpu) / 1000
    parts = {
        "gpu": o.usd_per_gpu / o.depreciation_years * per_hour,
        "network": o.usd_network_per_gpu / o.depreciation_years * per_hour,
        "host_and_storage": o.usd_host_and_storage_per_gpu / o.depreciation_years * per_hour,
        "power": kilowatt * o.usd_per_kWh / o.utilisation,
        "cooling": kilowatt * (o.power_overhead - 1) * o.usd_per_kWh / o.utilisation,
        "maintenance": capital * o.maintenance_share_per_year * per_hour,
        "staff": o.staff_usd_per_gpu_year * per_hour,
    }
    assumptions = [
        f"owned: {o.source}",
        f"{o.depreciation_years:g} years straight line, used {o.utilisation:.0%} of the time",
        f"{kilowatt:.2f} kW per GPU at {o.usd_per_kWh:g} USD/kWh, power overhead {o.power_overhead:g}",
    ]
    return GpuHour(math.fsum(parts.values()), parts, assumptions)
