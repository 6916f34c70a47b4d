"""How much slower or faster a program is than the calibrated efficiencies of its GPU type.

Published programs have one factor for the full step, fitted with the efficiencies (fit.py). The factor of lakh's own
trainer comes from measured runs (own_runs.py) and applies to work on the GPU only: runs on one GPU say nothing about
the network. It is used on the GPU types on which it was measured; elsewhere the factor is 1, and the estimate says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import ConfigError, DataError, UserError
from lakh.planner.calibration.fit import Calibration
from lakh.planner.calibration.published_sources import program_names
from lakh.planner.timing.step_time import GPU_PARTS, StepTime

__all__ = ["LAKH", "OwnFactor", "ProgramFactor", "load_own_factors", "own_factors_to_toml", "program_factor"]

LAKH = "lakh"
SHIPPED = Path(__file__).parents[1] / "data" / "lakh_factors.toml"


@dataclass(frozen=True)
class ProgramFactor:
    program: str
    on_gpu: float = 1.0
    """Of computation, element-wise work, host time, bubble and optimizer."""
    elsewhere: float = 1.0
    """Of communication."""
    basis: str = ""

    def apply(self, step: StepTime) -> StepTime:
        factors = {name: self.on_gpu if name in GPU_PARTS else self.elsewhere for name in vars(step)}
        return StepTime(**{name: value * factors[name] for name, value in vars(step).items()})


@dataclass(frozen=True, kw_only=True)
class OwnFactor:
    """Measured over predicted work on the GPU, of a program's own runs on one GPU type."""

    on_gpu: float
    low: float
    """Of the runs, the least."""
    high: float
    runs: int


def program_factor(
    program: str, kind: str, calibration: Calibration, own: dict[str, OwnFactor] | None = None
) -> ProgramFactor:
    """The factor of a program on a GPU type; `own` are factors of lakh's trainer (default: those that ship with it)."""
    if program == LAKH:
        factors = _shipped() if own is None else own
        if kind not in factors:
            return ProgramFactor(program, basis=f"factor 1: no runs of lakh were measured on {kind}")
        one = factors[kind]
        basis = f"factor {one.on_gpu:.3f} on the GPU, from {one.runs} measured runs ({one.low:.3f} to {one.high:.3f})"
        return ProgramFactor(program, on_gpu=one.on_gpu, basis=basis)
    if program not in program_names():
        raise UserError(f"--program {program}", "is not known", f"choose from: {', '.join((LAKH, *program_names()))}")
    if program in calibration.program_factors:
        factor = calibration.program_factors[program]
        return ProgramFactor(
            program, factor, factor, f"factor {factor:.3f}, fitted to published {calibration.kind} rows"
        )
    return ProgramFactor(program, basis=f"factor 1: the efficiencies of {calibration.kind} have none for it")


@cache
def _shipped() -> dict[str, OwnFactor]:
    return load_own_factors(SHIPPED)


def load_own_factors(path: str | Path) -> dict[str, OwnFactor]:
    """GPU type -> factor, from a file that `lakh plan calibrate --from` wrote."""
    if not Path(path).is_file():
        raise UserError(str(path), "no such file", "make one with: lakh plan calibrate --from RUN --out FILE")
    try:
        data: dict[str, Any] = config.read_toml(Path(path))
        return {kind: OwnFactor(**table) for kind, table in data.items()}
    except (ConfigError, TypeError) as error:
        todo = "make it again: lakh plan calibrate --from RUN --out FILE"
        raise DataError(str(path), f"has no factors of runs ({error})", todo) from None


def own_factors_to_toml(factors: dict[str, OwnFactor]) -> str:
    lines = ["# Measured over predicted work on the GPU; written by `lakh plan calibrate --from`, do not edit by hand."]
    for kind, one in sorted(factors.items()):
        lines += ["", f"[{kind}]", f"on_gpu = {one.on_gpu:.4f}", f"low = {one.low:.4f}", f"high = {one.high:.4f}"]
        lines.append(f"runs = {one.runs}")
    return "\n".join(lines) + "\n"
