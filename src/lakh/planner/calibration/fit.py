"""Calibrated efficiencies per GPU type: free parameters, bounds and priors, the fit, and the shipped calibration.

At most twelve numbers per GPU type, including factors for programs. Each has a physical bound and a prior, so that a
parameter on which the data have no influence stays at its prior. The fit is a bounded least squares on
log(predicted/measured) with a robust loss: some published rows are far slower than their neighbours and stay in.
Sources count by the power SOURCE_WEIGHT of their number of rows, so that a thousand small rows do not outvote thirty
large ones.

A configuration is held out by the salted hash of its digest: 30 %, fixed before any fit. data/calibration.toml has the
shipped numbers and the digests they were fitted on, so that `validate` can tell which rows are unseen. Fitting needs
scipy (the [plan] extra); reading and using a calibration does not.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lakh import config
from lakh.errors import ConfigError, DataError, MissingExtra, UserError
from lakh.planner.calibration.error_bands import ErrorBand
from lakh.planner.calibration.measured_points import MeasuredPoint, stack_points
from lakh.planner.stacked import Array
from lakh.planner.timing.efficiency import Efficiency
from lakh.planner.timing.step_time import step_time

__all__ = [
    "FIT_SETTINGS",
    "Calibration",
    "calibration_for",
    "fit",
    "is_held_out",
    "load_calibrations",
    "predict",
    "to_toml",
]

SALT = "lakh-planner-1"
HOLD_OUT_TENTHS = 3
SOURCE_WEIGHT = -0.3
NOISE = 0.03  # log error from which a row's loss grows linearly instead of quadratically
MAX_PARAMETERS = 12
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, kw_only=True)
class FitParameter:
    prior: float
    low: float
    high: float
    spread: float
    """Standard deviation of the prior, in log units."""


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """Parameters fitted for a GPU type; the others stay at their prior, or at the result of another type."""

    free: tuple[str, ...]
    programs: tuple[str, ...] = ()
    """Programs whose step times get their own factor; others have 1."""
    priors: dict[str, float] = field(default_factory=dict)
    start_from: str | None = None
    """GPU type whose result is the starting point."""


@dataclass(frozen=True, kw_only=True)
class FitDescription:
    """data/fit.toml: what is fitted, within which bounds."""

    parameters: dict[str, FitParameter]
    program_factor: FitParameter
    gpu_types: dict[str, FitSettings]
    related: dict[str, str]
    """Types without measurements use the efficiencies of a related type."""
    emphasis: dict[str, float]
    """Source -> weight, where it is not 1."""


_DESCRIPTION = config.load(FitDescription, DATA / "fit.toml")
PARAMETERS, FIT_SETTINGS, EMPHASIS = _DESCRIPTION.parameters, _DESCRIPTION.gpu_types, _DESCRIPTION.emphasis


@dataclass(frozen=True)
class Calibration:
    kind: str
    efficiency: Efficiency
    program_factors: Mapping[str, float]
    num_parameters: int
    fitted: frozenset[str] = frozenset()
    """Digests of the configurations that were fitted."""
    error: Mapping[str, float] = field(default_factory=dict)
    """On held-out rows: n, mape, median_ape, p95_ape, bias."""
    bands: Mapping[str, ErrorBand] = field(default_factory=dict)
    """Kind of configuration -> error band, from held-out rows."""


def is_held_out(digest: str) -> bool:
    """Whether no fit may use the configuration with this digest."""
    return int(hashlib.sha256(f"{SALT}{digest}".encode()).hexdigest(), 16) % 10 < HOLD_OUT_TENTHS


def predict(points: Sequence[MeasuredPoint], calibration: Calibration) -> Array:
    """Seconds per step of each point: its fastest candidate, times its program's factor."""
    model, plan, cluster, starts = stack_points(points)
    best = np.minimum.reduceat(step_time(model, plan, cluster, calibration.efficiency).total_s, starts)
    return best * np.array([float(calibration.program_factors.get(point.program, 1.0)) for point in points])


def fit(points: Iterable[MeasuredPoint], kind: str, start: Efficiency | None = None) -> Calibration:
    """Fit one GPU type to exactly these points."""
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise MissingExtra("lakh plan calibrate", "scipy", "plan") from None
    settings = FIT_SETTINGS[kind]
    rows = [point for point in points if point.kind == kind]
    if len(rows) < 3:
        raise UserError(f"calibration of {kind}", f"has {len(rows)} points", "give at least 3")
    programs = _identifiable(settings.programs, Counter(point.program for point in rows))
    priors = {name: settings.priors.get(name, parameter.prior) for name, parameter in PARAMETERS.items()}
    base = start or replace(Efficiency(), **priors)
    free = len(settings.free)
    parameters = [replace(PARAMETERS[name], prior=float(getattr(base, name))) for name in settings.free]
    parameters += [_DESCRIPTION.program_factor] * len(programs)
    assert len(parameters) <= MAX_PARAMETERS
    model, plan, cluster, starts = stack_points(rows)
    measured = np.array([point.step_s for point in rows])
    count = Counter(point.source for point in rows)
    weight = np.array([EMPHASIS.get(point.source, 1.0) * count[point.source] ** SOURCE_WEIGHT for point in rows])
    uses = np.array([[float(name == point.program) for name in programs] for point in rows])
    uses = uses.reshape(len(rows), len(programs))

    def loss(x: Array) -> Array:
        efficiency = replace(base, **dict(zip(settings.free, np.exp(x), strict=False)))
        best = np.minimum.reduceat(step_time(model, plan, cluster, efficiency).total_s, starts)
        miss = (np.log(best / measured) + uses @ x[free:]) / NOISE
        robust = weight * np.sign(miss) * np.sqrt(2 * (np.sqrt(1 + miss**2) - 1))
        prior = [(x[i] - math.log(one.prior)) / one.spread for i, one in enumerate(parameters)]
        return np.concatenate([robust, prior])

    begin = np.log([one.prior for one in parameters])
    bounds = (np.log([one.low for one in parameters]), np.log([one.high for one in parameters]))
    found = np.exp(least_squares(loss, np.clip(begin, *bounds), bounds=bounds, max_nfev=100).x)
    efficiency = replace(base, **{name: float(v) for name, v in zip(settings.free, found, strict=False)})
    factors = {name: float(v) for name, v in zip(programs, found[free:], strict=True)}
    return Calibration(kind, efficiency, factors, len(parameters), frozenset(point.config for point in rows))


def _identifiable(programs: Sequence[str], count: Counter[str]) -> tuple[str, ...]:
    """Programs whose factor these rows separate from the speed of the GPU: where every row's program has a factor, the
    most frequent one is the reference for the others."""
    known = [name for name in programs if count[name]]
    if known and set(count) <= set(known):
        known.remove(max(known, key=lambda name: count[name]))
    return tuple(known)


# --- the calibration file ---


def to_toml(calibrations: Mapping[str, Calibration], note: str) -> str:
    lines = ["# Written by `lakh plan calibrate`; do not edit by hand.", f"# {note}", f'salt = "{SALT}"']
    for kind, one in calibrations.items():
        factors, digests = sorted(one.program_factors.items()), sorted(one.fitted)
        lines += ["", f"[{kind}]", f"knobs = {one.num_parameters}", "", f"[{kind}.fractions]"]
        lines += [f"{name} = {float(getattr(one.efficiency, name)):.6g}" for name in PARAMETERS]
        lines += ["", f"[{kind}.codes]", *(f'"{name}" = {value:.6g}' for name, value in factors)]
        lines += ["", f"[{kind}.error]", *(f"{name} = {value:.6g}" for name, value in one.error.items())]
        lines += ["", f"[{kind}.bands]"]
        lines += [
            f'"{name}" = {{ low = {band.low:.4f}, high = {band.high:.4f}, rows = {band.rows} }}'
            for name, band in one.bands.items()
        ]
        lines += ["", f"[{kind}.fitted]", "digests = ["]
        lines += ["    " + " ".join(f'"{d}",' for d in digests[i : i + 7]) for i in range(0, len(digests), 7)]
        lines += ["]"]
    return "\n".join(lines) + "\n"


def load_calibrations(path: str | Path | None = None) -> dict[str, Calibration]:
    """GPU type -> calibration, from a file or, without a path, from the one that ships with lakh."""
    file = Path(path) if path else DATA / "calibration.toml"
    if not file.exists():
        raise UserError(str(file), "no such file", "make one with: lakh plan calibrate --points CSV --out FILE")
    try:
        data = config.read_toml(file)
        data.pop("salt", None)
        return {kind: _from_data(kind, table) for kind, table in data.items()}
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(str(file), f"is not a calibration ({error!r})", "make it again: lakh plan calibrate") from None


def _from_data(kind: str, table: dict[str, Any]) -> Calibration:
    efficiency = Efficiency(**{name: float(table["fractions"][name]) for name in PARAMETERS})
    fitted = frozenset(table["fitted"]["digests"])
    bands = {name: ErrorBand(**band) for name, band in table.get("bands", {}).items()}
    codes, error = table.get("codes", {}), table.get("error", {})
    return Calibration(kind, efficiency, codes, int(table["knobs"]), fitted, error, bands)


@cache
def _shipped() -> dict[str, Calibration]:
    return load_calibrations()


def calibration_for(kind: str, calibrations: Mapping[str, Calibration] | None = None) -> tuple[Calibration, str]:
    """The calibration of a GPU type, and its basis."""
    table = _shipped() if calibrations is None else calibrations
    if kind in table:
        return table[kind], f"calibrated on {len(table[kind].fitted)} published {kind} configurations"
    related = _DESCRIPTION.related.get(kind, "")
    if related in table:
        return table[related], f"no measurements of its own: efficiencies of {related}"
    return Calibration(kind, Efficiency(), {}, 0), "uncalibrated: priors only"
