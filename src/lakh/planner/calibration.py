"""Calibrated fractions per GPU type: what may vary, within which bounds, how it is fitted, and what is shipped.

At most twelve numbers per GPU type, software factors included; each has a physical bound and a prior, so that a knob
the data say nothing about stays where physics puts it. The fit is a bounded least squares on log(predicted/measured)
with a robust loss: some published rows are far slower than their neighbours and stay in. Sources count by the power
SOURCE_WEIGHT of their number of rows, so that a thousand small rows do not outvote thirty large ones.

A configuration is held out when the salted hash of its digest says so: 30 %, decided before any fit. Shipped numbers
lie in data/calibration.toml together with the digests they were fitted on, so that `validate` knows what is unseen.
Fitting needs scipy (the [plan] extra); reading and using a calibration does not.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lakh.errors import DataError, MissingExtra, UserError
from lakh.planner.points import Point, stack
from lakh.planner.shape import Array
from lakh.planner.steptime import Fractions, step_time

__all__ = ["KINDS", "KNOBS", "Calibrated", "Knob", "calibrated", "fit", "is_held_out", "load", "predict", "to_toml"]

SALT = "lakh-planner-1"
HOLD_OUT_TENTHS = 3
SOURCE_WEIGHT = -0.3
EMPHASIS = {"vTrain multi-node": 2.0}  # the one multi-node table that varies the layout instead of showing the best
NOISE = 0.03  # log error from which a row's loss grows linearly instead of quadratically
MAX_KNOBS = 12
DATA = Path(__file__).with_name("data") / "calibration.toml"


@dataclass(frozen=True)
class Knob:
    prior: float
    low: float
    high: float
    spread: float
    """Standard deviation of the prior, in log units."""


# Bounds: no fraction above 0.95 of a peak but the network, whose stated rate is already a payload rate in some sources.
KNOBS = {
    "gemm": Knob(0.8, 0.45, 0.92, 0.10),
    "gemm_knee": Knob(140.0, 20.0, 600.0, 0.5),
    "wave": Knob(0.5, 0.05, 1.0, 0.5),
    "attention": Knob(0.38, 0.15, 0.75, 0.3),
    "memory": Knob(0.78, 0.4, 0.95, 0.15),
    "host_us": Knob(300.0, 20.0, 1000.0, 0.5),
    "collective_us": Knob(50.0, 2.0, 400.0, 0.6),
    "node": Knob(0.75, 0.35, 0.95, 0.2),
    "nic": Knob(0.7, 0.3, 1.0, 0.3),
    "interference": Knob(0.2, 0.01, 0.6, 0.5),
    "low_precision": Knob(0.9, 0.2, 1.0, 0.15),
    "fixed_ms": Knob(10.0, 0.5, 200.0, 0.7),
}
CODE = Knob(1.0, 0.6, 1.6, 0.2)


@dataclass(frozen=True)
class Plan:
    """What is fitted for a GPU type; the rest stays at its prior, or at what another type found."""

    free: tuple[str, ...]
    codes: tuple[str, ...] = ()
    """Programs whose step times get a factor of their own; others are at 1."""
    priors: Mapping[str, float] = field(default_factory=dict)
    after: str | None = None
    """Start from another type's result."""


KINDS = {
    "A100": Plan(
        free=("gemm", "gemm_knee", "memory", "attention", "host_us", "collective_us", "node", "nic", "fixed_ms"),
        codes=("mt-nlg", "deepspeed-zero3", "megatron-deepspeed"),
        priors={"wave": 1.0},  # a block of its kernels works on one tile; those of later parts take one after another
    ),
    "H100": Plan(
        free=(
            "gemm",
            "memory",
            "attention",
            "host_us",
            "collective_us",
            "node",
            "nic",
            "interference",
            "low_precision",
        ),
        codes=("nemo", "maxtext", "nanotron"),
        priors={"gemm": 0.7, "attention": 0.25},
    ),
    "Blackwell": Plan(
        free=(
            "gemm",
            "gemm_knee",
            "memory",
            "attention",
            "host_us",
            "collective_us",
            "node",
            "nic",
            "interference",
            "low_precision",
        ),
        priors={"gemm": 0.65, "host_us": 200.0, "attention": 0.4},
    ),
    "H100-500W": Plan(free=("gemm", "memory", "attention", "low_precision"), after="H100"),
}
# Types without measurements of their own use a relative's fractions, and say so.
RELATIVES = {"V100": "A100", "H200": "H100", "B200": "Blackwell", "GB200": "Blackwell", "B300": "Blackwell",
             "GB300": "Blackwell"}  # fmt: skip


@dataclass(frozen=True)
class Calibrated:
    kind: str
    fractions: Fractions
    codes: Mapping[str, float]
    knobs: int
    fitted: frozenset[str] = frozenset()
    """Digests of the configurations that were fitted."""
    error: Mapping[str, float] = field(default_factory=dict)
    """On held-out rows: n, mape, median_ape, p95_ape, bias; low and high: 10th and 90th percentile of the ratio."""


def is_held_out(config: str, salt: str = SALT) -> bool:
    """Whether a configuration belongs to the part that no fit may see."""
    return int(hashlib.sha256(f"{salt}{config}".encode()).hexdigest(), 16) % 10 < HOLD_OUT_TENTHS


def predict(points: Sequence[Point], fractions: Fractions, codes: Mapping[str, float]) -> Array:
    """Seconds per step of each point: of its fastest candidate, times its program's factor."""
    shape, layout, hardware, starts = stack(points)
    total = step_time(shape, layout, hardware, fractions).total_s
    best = np.minimum.reduceat(total, starts)
    return best * np.array([_factor(point, codes) for point in points])


def _factor(point: Point, codes: Mapping[str, float]) -> float:
    return float(codes.get(point.code, 1.0))


def fit(points: Iterable[Point], kind: str, start: Fractions | None = None) -> Calibrated:
    """Fit one GPU type on exactly these points."""
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise MissingExtra("lakh plan calibrate", "scipy", "plan") from None
    plan = KINDS[kind]
    rows = [point for point in points if point.kind == kind]
    if len(rows) < 3:
        raise UserError(f"calibration of {kind}", f"has {len(rows)} points", "give at least 3")
    codes = _told_apart(plan.codes, Counter(point.code for point in rows))
    knobs = [_knob(plan, name, start) for name in plan.free]
    knobs += [CODE] * len(codes)
    assert len(knobs) <= MAX_KNOBS
    base = replace(start or Fractions(), **({} if start else _at_prior(plan)))
    shape, layout, hardware, starts = stack(rows)
    measured = np.array([point.step_s for point in rows])
    count = Counter(point.source for point in rows)
    weight = np.array([EMPHASIS.get(point.source, 1.0) * count[point.source] ** SOURCE_WEIGHT for point in rows])
    power = np.array([[float(code == point.code) for code in codes] for point in rows]).reshape(len(rows), len(codes))

    def loss(x: Array) -> Array:
        values = np.exp(x)
        fractions = replace(base, **dict(zip(plan.free, values, strict=False)))
        best = np.minimum.reduceat(step_time(shape, layout, hardware, fractions).total_s, starts)
        miss = (np.log(best / measured) + power @ x[len(plan.free) :]) / NOISE
        robust = weight * np.sign(miss) * np.sqrt(2 * (np.sqrt(1 + miss**2) - 1))
        prior = [(x[i] - math.log(knob.prior)) / knob.spread for i, knob in enumerate(knobs)]
        return np.concatenate([robust, prior])

    begin = np.log([knob.prior for knob in knobs])
    bounds = (np.log([knob.low for knob in knobs]), np.log([knob.high for knob in knobs]))
    found = np.exp(least_squares(loss, np.clip(begin, *bounds), bounds=bounds, max_nfev=100).x)
    fractions = replace(base, **{name: float(v) for name, v in zip(plan.free, found, strict=False)})
    factors = {code: float(v) for code, v in zip(codes, found[len(plan.free) :], strict=True)}
    return Calibrated(kind, fractions, factors, len(knobs), frozenset(point.config for point in rows))


def _told_apart(codes: Sequence[str], count: Counter[str]) -> tuple[str, ...]:
    """The factors that these rows can tell from the speed of the GPU: where every program has one, the most frequent
    is what the others are measured against."""
    known = [code for code in codes if count[code]]
    if known and set(count) <= set(known):
        known.remove(max(known, key=lambda code: count[code]))
    return tuple(known)


def _at_prior(plan: Plan) -> dict[str, float]:
    return {name: plan.priors.get(name, knob.prior) for name, knob in KNOBS.items()}


def _knob(plan: Plan, name: str, start: Fractions | None) -> Knob:
    prior = getattr(start, name) if start else plan.priors.get(name, KNOBS[name].prior)
    return replace(KNOBS[name], prior=float(prior))


# --- the shipped file ---


def to_toml(found: Mapping[str, Calibrated], note: str) -> str:
    lines = ["# Written by `lakh plan calibrate`; do not edit by hand.", f"# {note}", f'salt = "{SALT}"']
    for kind, one in found.items():
        lines += ["", f"[{kind}]", f"knobs = {one.knobs}", "", f"[{kind}.fractions]"]
        lines += [f"{name} = {float(getattr(one.fractions, name)):.6g}" for name in KNOBS]
        lines += ["", f"[{kind}.codes]", *(f'"{name}" = {value:.6g}' for name, value in sorted(one.codes.items()))]
        lines += ["", f"[{kind}.error]", *(f"{name} = {value:.6g}" for name, value in one.error.items())]
        digests = sorted(one.fitted)
        lines += ["", f"[{kind}.fitted]", "digests = ["]
        lines += ["    " + " ".join(f'"{d}",' for d in digests[i : i + 7]) for i in range(0, len(digests), 7)]
        lines += ["]"]
    return "\n".join(lines) + "\n"


def load(path: str | Path | None = None) -> dict[str, Calibrated]:
    """A calibration file; without a path the one that ships with lakh."""
    file = Path(path) if path else DATA
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            str(file), "no such file", "make one with: lakh plan calibrate --points CSV --out FILE"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(str(file), f"cannot be read ({error})", "make it again with: lakh plan calibrate") from None
    data.pop("salt", None)
    try:
        return {kind: _from_data(kind, table) for kind, table in data.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(str(file), f"is not a calibration ({error!r})", "make it again: lakh plan calibrate") from None


def _from_data(kind: str, table: dict[str, Any]) -> Calibrated:
    fractions = Fractions(**{name: float(table["fractions"][name]) for name in KNOBS})
    fitted = frozenset(table["fitted"]["digests"])
    return Calibrated(kind, fractions, table.get("codes", {}), int(table["knobs"]), fitted, table.get("error", {}))


@cache
def _shipped() -> dict[str, Calibrated]:
    return load()


def calibrated(kind: str, found: Mapping[str, Calibrated] | None = None) -> tuple[Calibrated, str]:
    """The fractions for a GPU type, and on what they rest."""
    table = _shipped() if found is None else found
    if kind in table:
        return table[kind], f"calibrated on {len(table[kind].fitted)} published {kind} configurations"
    relative = RELATIVES.get(kind, "")
    if relative in table:
        return table[relative], f"no measurements of its own: fractions of {relative}"
    return Calibrated(kind, Fractions(), {}, 0), "uncalibrated: priors only"
