"""How much a joint search gains over a grid: model x oversubscription x distance x loss, on given sites.

Every cell replaces all links of the sites file by links of one kind, without additional wavelengths. Results are
simulated; they describe this grid, not the world. A grid takes many minutes: with a file of cells every finished cell
is kept, and a study that was interrupted continues.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lakh.errors import DataError, UserError
from lakh.planner.across.across_plan import plan_across
from lakh.planner.across.sites import Sites
from lakh.spec.model import Model

__all__ = ["StudyCells", "StudyGrid", "study_links", "summary", "with_links"]

STUDY_DEPTHS = (1, 2, 4, 8, 16, 32)
"""Pipeline stages that a cell considers, to keep the grid short."""
KEY = ("model", "oversubscription", "distance_km", "loss")


@dataclass(frozen=True, kw_only=True)
class StudyGrid:
    models: Mapping[str, Model]
    oversubscriptions: Sequence[float] = (16.0, 64.0, 256.0, 1024.0)
    distances_km: Sequence[float] = (10.0, 100.0, 1000.0)
    losses: Sequence[float] = (0.0, 1e-5, 1e-3)
    depths: Sequence[int] = STUDY_DEPTHS

    @property
    def keys(self) -> list[tuple[str, float, float, float]]:
        return list(itertools.product(self.models, self.oversubscriptions, self.distances_km, self.losses))


@dataclass
class StudyCells:
    """Finished cells: in memory, and in a file of JSON lines if a path is given."""

    asked: Mapping[str, Any]
    """Sites, batch and sequence: cells of other ones are refused."""
    path: Path | None = None
    rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break was not finished
            try:
                row = json.loads(line)
                key, asked = tuple(row[name] for name in KEY), {name: row[name] for name in self.asked}
                row["gain"]["production"]
            except (ValueError, KeyError, TypeError):
                where = f"{self.path}, line {number}"
                raise DataError(where, "is no cell of a study", "remove the line, or name another file") from None
            if asked != dict(self.asked):
                found = f"is of another study: {asked} instead of {dict(self.asked)}"
                raise UserError(f"{self.path}, line {number}", found, "name another file")
            self.rows[key] = row
        if lines[-1]:
            self.path.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        row = {**self.asked, **row}
        self.rows[tuple(row[name] for name in KEY)] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def with_links(sites: Sites, *, oversubscription: float, distance_km: float, loss: float) -> Sites:
    """The same sites with links of one kind, and with their network as it is but for additional wavelengths."""
    links = tuple(
        replace(link, oversubscription=oversubscription, bandwidth_Tbps=None, distance_km=distance_km, loss=loss)
        for link in sites.links
    )
    return replace(sites, links=links, network=replace(sites.network, extra_wavelengths=(0,)))


def study_links(
    grid: StudyGrid, sites: Sites, *, batch: int, sequence: int, cells: StudyCells | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Gains of every cell, and their distribution. Cells that are already among `cells` are not computed again."""
    if not sites.links:
        raise UserError(f"sites {sites.name}", "has no links to study", "give sites with links between them")
    cells = cells or StudyCells({"sites": sites.name, "batch": batch, "sequence": sequence})
    keys = grid.keys
    missing = [key for key in keys if key not in cells.rows]
    spent_s = 0.0
    for done, key in enumerate(missing):
        name, over, distance, loss = key
        number, left = keys.index(key) + 1, len(missing) - done
        rest = f"; {spent_s / done:.0f} s a cell, {left * spent_s / done / 60:.0f} min left" if done else ""
        progress(f"{number} of {len(keys)}: {name}, 1:{over:g}, {distance:g} km, loss {loss:g}{rest}")
        model, changed = grid.models[name], with_links(sites, oversubscription=over, distance_km=distance, loss=loss)
        depths = [n for n in grid.depths if n <= model.layers]
        found = plan_across(model, changed, batch=batch, sequence=sequence, depths=depths)
        cells.add(
            {"model": name, "oversubscription": over, "distance_km": distance, "loss": loss,
             "rtt_ms": 2e3 * changed.links[0].delay_s, "best_s": found.best["step_s"],
             "production_s": found.baselines["production"]["step_s"], "crossing": found.best["crossing"],
             "placement": found.best["placement"], "schedule": found.best["schedule"], "gain": found.gain,
             "searched": found.searched, "seconds": found.seconds}
        )  # fmt: skip
        spent_s += found.seconds
    return summary([cells.rows[key] for key in keys])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Cells, the distribution of their gains, of all and by model, and how often each axis crosses the links."""
    by_model = {
        name: _gains([row for row in rows if row["model"] == name])
        for name in dict.fromkeys(row["model"] for row in rows)
    }
    crossing = dict(Counter(row["crossing"] for row in rows))
    return {"cells": list(rows), "gain": _gains(rows), "by_model": by_model, "crossing": crossing, "simulated": True}


def _gains(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {name: _distribution([row["gain"][name] for row in rows]) for name in rows[0]["gain"]}


def _distribution(values: Sequence[float]) -> dict[str, float]:
    least, low, median, high, most = (float(q) for q in np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
    return {"min": least, "p25": low, "median": median, "p75": high, "max": most}
