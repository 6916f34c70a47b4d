"""How many GPUs a data hall holds, and which limit binds: power, cooling, floor space, or cable length.

A hall is a grid of rack positions with a budget of power and of cooling (air, liquid, or both), shared by GPU racks,
network racks and support services (readers, storage, management). A zone is a set of GPU racks at full bisection: all
within one cable length of the network racks at its centre, and no more GPUs than its switches connect. Zones are placed
greedily, each at the position that reaches the most free racks; services take the remaining positions at the edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from lakh import config
from lakh.errors import UserError
from lakh.planner.stacked import Array

__all__ = ["DataHall", "HallLayout", "fill_hall", "load_hall", "scenarios"]

EXAMPLE = Path(__file__).parents[1] / "data" / "hall_h100_air.toml"
Cooling = Literal["air", "liquid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRack:
    gpus_per_server: int
    server_kW: float
    servers_per_rack: int
    """Servers that fit mechanically."""
    air_limit_kW_per_rack: float
    liquid_limit_kW_per_rack: float

    def __post_init__(self) -> None:
        config.require_positive(self, "gpus_per_server", "servers_per_rack")
        powers = ("server_kW", "air_limit_kW_per_rack", "liquid_limit_kW_per_rack")
        config.require(self, powers, lambda power_kW: power_kW > 0, "is not positive", "give kilowatts")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkRack:
    gpus_per_rack: int
    """GPUs that the switches of one network rack connect."""
    kW_per_rack: float
    gpus_per_zone: int
    """Most GPUs at full bisection."""

    def __post_init__(self) -> None:
        config.require_positive(self, "gpus_per_rack", "gpus_per_zone")


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportService:
    name: str
    racks: int
    kW_per_rack: float
    movable: bool
    """Can move to another hall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataHall:
    name: str
    source: str
    power_kW: float
    air_cooling_kW: float
    liquid_cooling_kW: float
    rows: int
    racks_per_row: int
    rack_pitch_m: float
    row_pitch_m: float
    cable_limit_m: float
    cable_slack_m: float
    """Subtracted from every cable: vertical runs and corners."""
    gpu: GpuRack
    network: NetworkRack
    support: tuple[SupportService, ...] = ()

    def __post_init__(self) -> None:
        config.require_positive(self, "rows", "racks_per_row")
        config.require(self, "power_kW", lambda power_kW: power_kW > 0, "is not positive", "give kilowatts")
        config.require_not_negative(self, "air_cooling_kW", "liquid_cooling_kW")
        longer = "m is not longer than the slack"
        config.require(self, "cable_limit_m", lambda limit: limit > self.cable_slack_m, longer, "give a longer cable")


@dataclass(frozen=True)
class HallLayout:
    """GPUs, racks and power of a filled hall."""

    scenario: str
    gpus: int
    gpu_racks: int
    servers_per_rack: int
    network_racks: int
    support_racks: int
    zones: list[int]
    """GPUs of each full-bisection zone, largest first."""
    power_kW: float
    air_kW: float
    liquid_kW: float
    binds: str
    longest_cable_m: float
    placement: list[str] = field(default_factory=list)
    """The floor, one line per row: digits are zones' GPU racks, N network, S services, a dot a free position."""


def load_hall(path: str | Path | None = None) -> DataHall:
    return config.load(DataHall, path or EXAMPLE)


def fill_hall(
    hall: DataHall, *, cooling: Cooling = "air", moved: tuple[str, ...] = (), scenario: str = "as it is"
) -> HallLayout:
    """The layout with the most GPUs over all numbers of servers per rack; of equals, the one with the largest zone."""
    known = {item.name for item in hall.support if item.movable}
    for name in moved:
        if name not in known:
            todo = f"choose from: {', '.join(sorted(known)) or 'nothing'}"
            raise UserError(f"--move {name}", "cannot be moved", todo)
    stays = [item for item in hall.support if item.name not in moved]
    limit_kW = hall.gpu.air_limit_kW_per_rack if cooling == "air" else hall.gpu.liquid_limit_kW_per_rack
    most = min(hall.gpu.servers_per_rack, math.floor(limit_kW / hall.gpu.server_kW + 1e-9))
    if most < 1:
        binds = f"a server of {hall.gpu.server_kW:g} kW exceeds the {cooling} cooling of a rack ({limit_kW:g} kW)"
        return HallLayout(scenario, 0, 0, 0, 0, 0, [], 0.0, 0.0, 0.0, binds, 0.0)
    options = [_fill(hall, cooling, stays, servers, scenario) for servers in range(1, most + 1)]
    return max(options, key=lambda one: (one.gpus, one.zones[0] if one.zones else 0, one.servers_per_rack))


def _fill(hall: DataHall, cooling: Cooling, stays: list[SupportService], servers: int, scenario: str) -> HallLayout:
    rack_gpus, rack_kW = servers * hall.gpu.gpus_per_server, servers * hall.gpu.server_kW
    support_racks = sum(item.racks for item in stays)
    support_kW = sum(item.racks * item.kW_per_rack for item in stays)
    positions = hall.rows * hall.racks_per_row
    network_per_gpu = 1 / hall.network.gpus_per_rack
    per_rack_kW = rack_kW + rack_gpus * network_per_gpu * hall.network.kW_per_rack
    air_per_rack = per_rack_kW if cooling == "air" else per_rack_kW - rack_kW
    limits = {
        "power": (hall.power_kW - support_kW) / per_rack_kW,
        "floor": (positions - support_racks) / (1 + rack_gpus * network_per_gpu),
        "air cooling": (hall.air_cooling_kW - support_kW) / air_per_rack,
    }
    if cooling == "liquid":
        limits["liquid cooling"] = hall.liquid_cooling_kW / rack_kW
    binds = min(limits, key=lambda name: limits[name])
    wanted = max(math.floor(limits[binds] + 1e-9), 0)
    grid, zones, longest = _place(hall, wanted, rack_gpus, support_racks)
    racks = sum(zones) // rack_gpus
    network = int(np.sum(grid == "N"))
    if racks < wanted:
        binds = "cable length and zone size"
    return HallLayout(
        scenario=scenario,
        gpus=sum(zones),
        gpu_racks=racks,
        servers_per_rack=servers,
        network_racks=network,
        support_racks=support_racks,
        zones=sorted(zones, reverse=True),
        power_kW=racks * rack_kW + network * hall.network.kW_per_rack + support_kW,
        air_kW=(racks * rack_kW if cooling == "air" else 0.0) + network * hall.network.kW_per_rack + support_kW,
        liquid_kW=racks * rack_kW if cooling == "liquid" else 0.0,
        binds=binds,
        longest_cable_m=longest,
        placement=["".join(row) for row in grid],
    )


def _place(hall: DataHall, wanted: int, rack_gpus: int, support_racks: int) -> tuple[Array, list[int], float]:
    """Place zones of GPU racks around their network racks, largest first; services take the last free positions."""
    rows, columns = np.indices((hall.rows, hall.racks_per_row))
    y, x = rows * hall.row_pitch_m, columns * hall.rack_pitch_m
    grid = np.full((hall.rows, hall.racks_per_row), ".", dtype="<U1")
    reach = hall.cable_limit_m - hall.cable_slack_m
    per_zone = max(hall.network.gpus_per_zone // rack_gpus, 1)
    zones: list[int] = []
    longest, left = 0.0, wanted
    free_after_support = grid.size - support_racks
    while left > 0 and free_after_support > 1:
        want = min(left, per_zone)
        best: tuple[int, float, Array] | None = None
        for row, column in zip(*np.nonzero(grid == "."), strict=True):
            distance = np.abs(y - y[row, column]) + np.abs(x - x[row, column])
            usable = np.argwhere((grid == ".") & (distance <= reach))
            order = usable[np.argsort(distance[usable[:, 0], usable[:, 1]], kind="stable")]
            count = min(len(order), free_after_support)
            network = math.ceil(want * rack_gpus / hall.network.gpus_per_rack)
            racks = min(want, max(count - network, 0))
            if racks <= 0:
                continue
            network = math.ceil(racks * rack_gpus / hall.network.gpus_per_rack)
            far = order[min(racks + network, len(order)) - 1]
            cable = float(distance[far[0], far[1]])
            if best is None or (racks, -cable) > (best[0], -best[1]):
                best = (racks, cable, order[: racks + network])
        if best is None:
            break
        racks, cable, spots = best
        network = math.ceil(racks * rack_gpus / hall.network.gpus_per_rack)
        grid[spots[:network, 0], spots[:network, 1]] = "N"
        grid[spots[network:, 0], spots[network:, 1]] = str(len(zones) % 10)
        zones.append(racks * rack_gpus)
        longest = max(longest, cable + hall.cable_slack_m)
        free_after_support -= racks + network
        left -= racks
    spots = np.argwhere(grid == ".")[::-1][:support_racks]
    grid[spots[:, 0], spots[:, 1]] = "S"
    return grid, zones, longest


def scenarios(hall: DataHall) -> list[HallLayout]:
    """The hall as it is, with each movable service moved out, with all of them, and with liquid cooling."""
    movable = tuple(item.name for item in hall.support if item.movable)
    found = [fill_hall(hall)]
    found += [fill_hall(hall, moved=(name,), scenario=f"{name} moved out") for name in movable]
    if len(movable) > 1:
        found.append(fill_hall(hall, moved=movable, scenario=f"{' and '.join(movable)} moved out"))
    liquid = hall if hall.liquid_cooling_kW else replace(hall, liquid_cooling_kW=hall.power_kW)
    note = "liquid" if hall.liquid_cooling_kW else "if it had liquid cooling for all its power"
    found.append(fill_hall(liquid, cooling="liquid", moved=movable, scenario=f"{note}, services moved out"))
    return found
