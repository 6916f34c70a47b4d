"""Price of a GPU-hour: rented, from a price book, or owned, from its parts. All amounts in US dollars.

The price book is data (data/prices.toml, or a user's file); every answer lists its assumptions.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import ConfigError, UserError

__all__ = ["GpuHour", "OwnedPrice", "PriceBook", "RentedPrice", "gpu_hour", "load_prices"]

DATA = Path(__file__).parents[1] / "data" / "prices.toml"
HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RentedPrice:
    usd_per_gpu_hour: float
    source: str

    def __post_init__(self) -> None:
        _require_not_negative(self, "usd_per_gpu_hour")


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
        _require_not_negative(self, "usd_per_gpu", "usd_per_kWh", "usd_network_per_gpu", "usd_host_and_storage_per_gpu")
        if self.depreciation_years <= 0 or self.power_overhead < 1 or not 0 < self.utilisation <= 1:
            raise ConfigError(
                "depreciation_years",
                "depreciation_years must be above 0, power_overhead 1 or more, utilisation above 0 up to 1",
                "correct them",
            )


@dataclass(frozen=True)
class GpuHour:
    """Price of one GPU for one hour, and the parts that add up to it."""

    usd: float
    parts: dict[str, float]
    assumptions: list[str]


@dataclass(frozen=True)
class PriceBook:
    rented: dict[str, RentedPrice]
    owned: OwnedPrice


@cache
def load_prices(path: str | Path | None = None) -> PriceBook:
    file = Path(path) if path else DATA
    try:
        data: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(str(file), "no such file", "give a price book in TOML") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(str(file), f"cannot be read ({error})", "give a price book in TOML") from None
    unknown = sorted(set(data) - {"rented", "owned"})
    if unknown:
        raise ConfigError(f"{unknown[0]} ({file.name})", "no such section", "known here: rented, owned")
    rented = {
        kind: config.from_dict(RentedPrice, table, origin=f"{file.name} [rented.{kind}]")
        for kind, table in data.get("rented", {}).items()
    }
    own = data.get("owned") or tomllib.loads(DATA.read_text(encoding="utf-8"))["owned"]
    return PriceBook(rented, config.from_dict(OwnedPrice, own, origin=f"{file.name} [owned]"))


def gpu_hour(prices: PriceBook, kind: str, *, owned: bool = False, power_W: float | None = None) -> GpuHour:
    if not owned:
        if kind not in prices.rented:
            known = ", ".join(prices.rented)
            raise UserError(f"price of {kind}", "is not in the price book", f"add [rented.{kind}]; known: {known}")
        price = prices.rented[kind]
        return GpuHour(price.usd_per_gpu_hour, {"rent": price.usd_per_gpu_hour}, [f"rented: {price.source}"])
    o = prices.owned
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


def _require_not_negative(item: Any, *names: str) -> None:
    for name in names:
        if getattr(item, name) < 0:
            raise ConfigError(name, f"{getattr(item, name)} is negative", "give an amount in US dollars")
