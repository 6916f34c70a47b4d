"""How many GPUs a data hall holds, and which of its limits binds: power, cooling, floor, or the length of a cable.

A hall is a grid of rack positions with a budget of power and of cooling (air, liquid, or both). GPU racks, the
network racks that join them and the services beside them (readers, storage, management) share it. A zone is a set of
GPU racks at full bisection: all of them within one cable of the network racks at its heart, and no more GPUs than its
switches carry. Zones are placed greedily, each at the spot that reaches the most free positions; services fill what is
left at the edges. Nothing here knows what the GPUs compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from lakh import config
from lakh.errors import ConfigError, UserError
from lakh.planner.shape import Array

__all__ = ["Fill", "GpuRack", "Hall", "NetworkRack", "Support", "fill", "load_hall", "scenarios"]

EXAMPLE = Path(__file__).with_name("data") / "hall_h100_air.toml"
Cooling = Literal["air", "liquid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRack:
    gpus_per_server: int
    server_kW: float
    servers_per_rack: int
    """What fits mechanically."""
    air_limit_kW_per_rack: float
    liquid_limit_kW_per_rack: float

    def __post_init__(self) -> None:
        config.require_positive(self, "gpus_per_server", "servers_per_rack")
        if min(self.server_kW, self.air_limit_kW_per_rack, self.liquid_limit_kW_per_rack) <= 0:
            raise ConfigError("server_kW", "powers must be above 0", "give kilowatts")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkRack:
    gpus_per_rack: int
    """GPUs that the switches of one network rack join."""
    kW_per_rack: float
    gpus_per_zone: int
    """Most GPUs at full bisection."""

    def __post_init__(self) -> None:
        config.require_positive(self, "gpus_per_rack", "gpus_per_zone")


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    name: str
    racks: int
    kW_per_rack: float
    movable: bool
    """May move to another hall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hall:
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
    """Up, down and round corners: taken off every cable."""
    gpu: GpuRack
    network: NetworkRack
    support: tuple[Support, ...] = ()

    def __post_init__(self) -> None:
        config.require_positive(self, "rows", "racks_per_row")
        if self.power_kW <= 0 or min(self.air_cooling_kW, self.liquid_cooling_kW) < 0:
            raise ConfigError("power_kW", "must be above 0, and cooling 0 or more", "give kilowatts")
        if self.cable_limit_m <= self.cable_slack_m:
            raise ConfigError("cable_limit_m", f"{self.cable_limit_m} m is used up by the slack", "give a longer cable")


@dataclass(frozen=True)
class Fill:
    """One way to fill the hall."""

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
    """The floor, a row a line: digits are zones' GPU racks, N network, S services, a dot a free position."""


def load_hall(path: str | Path | None = None) -> Hall:
    return config.load(Hall, path or EXAMPLE)


def fill(hall: Hall, *, cooling: Cooling = "air", moved: tuple[str, ...] = (), scenario: str = "as it is") -> Fill:
    """The most GPUs that the hall holds, over all numbers of servers per rack; ties go to the larger first zone."""
    known = {item.name for item in hall.support if item.movable}
    for name in moved:
        if name not in known:
            raise UserError(
                f"--move {name}", "cannot be moved", f"choose from: {', '.join(sorted(known)) or 'nothing'}"
            )
    stays = [item for item in hall.support if item.name not in moved]
    limit_kW = hall.gpu.air_limit_kW_per_rack if cooling == "air" else hall.gpu.liquid_limit_kW_per_rack
    most = min(hall.gpu.servers_per_rack, math.floor(limit_kW / hall.gpu.server_kW + 1e-9))
    if most < 1:
        words = f"a server of {hall.gpu.server_kW:g} kW is more than a rack may give off by {cooling} ({limit_kW:g} kW)"
        return Fill(scenario, 0, 0, 0, 0, 0, [], 0.0, 0.0, 0.0, words, 0.0)
    options = [_fill(hall, cooling, stays, servers, scenario) for servers in range(1, most + 1)]
    return max(options, key=lambda one: (one.gpus, one.zones[0] if one.zones else 0, one.servers_per_rack))


def _fill(hall: Hall, cooling: Cooling, stays: list[Support], servers: int, scenario: str) -> Fill:
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
    return Fill(
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


def _place(hall: Hall, wanted: int, rack_gpus: int, support_racks: int) -> tuple[Array, list[int], float]:
    """Zones of GPU racks round their network racks, the largest first; services at the far end of what is left."""
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


def scenarios(hall: Hall) -> list[Fill]:
    """As it is, with each movable service moved out, with all of them, and with liquid where there is any."""
    movable = tuple(item.name for item in hall.support if item.movable)
    found = [fill(hall)]
    found += [fill(hall, moved=(name,), scenario=f"{name} moved out") for name in movable]
    if len(movable) > 1:
        found.append(fill(hall, moved=movable, scenario=f"{' and '.join(movable)} moved out"))
    liquid = hall if hall.liquid_cooling_kW else replace(hall, liquid_cooling_kW=hall.power_kW)
    note = "liquid" if hall.liquid_cooling_kW else "if it had liquid cooling for all its power"
    found.append(fill(liquid, cooling="liquid", moved=movable, scenario=f"{note}, services moved out"))
    return found
