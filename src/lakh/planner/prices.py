"""What a GPU-hour costs: rented from a price book, or owned from its parts. All money in US dollars.

The book is data (data/prices.toml, or a file of the user's); every answer lists its assumptions, so that two people
can find out why they disagree. Knows nothing of models.
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

__all__ = ["GpuHour", "Owned", "Prices", "Rented", "gpu_hour", "load_prices"]

DATA = Path(__file__).with_name("data") / "prices.toml"
HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rented:
    usd_per_gpu_hour: float
    source: str

    def __post_init__(self) -> None:
        _require_not_negative(self, "usd_per_gpu_hour")


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    usd_per_gpu: float
    usd_network_per_gpu: float
    usd_host_and_storage_per_gpu: float
    depreciation_years: float
    usd_per_kWh: float
    power_overhead: float
    """Power of the hall over power of the machines (PUE)."""
    host_power_W_per_gpu: float
    """Of host, NICs and switches."""
    staff_usd_per_gpu_year: float
    maintenance_share_per_year: float
    """Of the purchase price."""
    utilisation: float
    """Share of the hours in which somebody uses the GPU: idle hours are paid by the others."""
    source: str

    def __post_init__(self) -> None:
        _require_not_negative(self, "usd_per_gpu", "usd_per_kWh", "usd_network_per_gpu", "usd_host_and_storage_per_gpu")
        if self.depreciation_years <= 0 or self.power_overhead < 1 or not 0 < self.utilisation <= 1:
            raise ConfigError(
                "depreciation_years",
                "depreciation_years must be above 0, power_overhead 1 or more, utilisation above 0 up to 1",
                "mend them",
            )


@dataclass(frozen=True)
class GpuHour:
    """The price of one GPU for one hour, and what it is made of; the parts add up."""

    usd: float
    parts: dict[str, float]
    assumptions: list[str]


@dataclass(frozen=True)
class Prices:
    rented: dict[str, Rented]
    owned: Owned


@cache
def load_prices(path: str | Path | None = None) -> Prices:
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
        kind: config.from_dict(Rented, table, origin=f"{file.name} [rented.{kind}]")
        for kind, table in data.get("rented", {}).items()
    }
    own = data.get("owned") or tomllib.loads(DATA.read_text(encoding="utf-8"))["owned"]
    return Prices(rented, config.from_dict(Owned, own, origin=f"{file.name} [owned]"))


def gpu_hour(prices: Prices, kind: str, *, owned: bool = False, power_W: float | None = None) -> GpuHour:
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
