"""The planner's error on measured steps of lakh's own trainer.

The shipped factor is the median of the runs in data/lakh_runs.csv: each of these is predicted with the median of the
others. Runs in data/lakh_later_runs.csv were measured after the factor was set, and are predicted with it as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.own_runs import MeasuredRun, read_runs
from lakh.planner.calibration.program_factor import LAKH, ProgramFactor, program_factor

__all__ = ["own_run_errors"]

DATA = Path(__file__).parents[1] / "data"
FITTED, LATER = DATA / "lakh_runs.csv", DATA / "lakh_later_runs.csv"


def own_run_errors() -> dict[str, Any]:
    """One row per run, and the mean and median of the absolute errors."""
    fitted, later = read_runs(FITTED), read_runs(LATER)
    rows = [_row(run, _factor_of_others(run, fitted), "factor of the other runs") for run in fitted]
    rows += [_row(run, _shipped_factor(run), "shipped factor, measured later") for run in later]
    scores = {}
    for basis in dict.fromkeys(row["basis"] for row in rows):
        errors = np.abs([row["error"] for row in rows if row["basis"] == basis])
        scores[basis] = {"n": len(errors), "mape": float(errors.mean()), "median_ape": float(np.median(errors))}
    return {"rows": rows, "scores": scores}


def _factor_of_others(run: MeasuredRun, runs: list[MeasuredRun]) -> ProgramFactor:
    others = [one.on_gpu for one in runs if one.kind == run.kind and one is not run]
    return ProgramFactor(LAKH, on_gpu=float(np.median(others))) if others else ProgramFactor(LAKH)


def _shipped_factor(run: MeasuredRun) -> ProgramFactor:
    return program_factor(LAKH, run.kind, calibration_for(run.kind)[0])


def _row(run: MeasuredRun, factor: ProgramFactor, basis: str) -> dict[str, Any]:
    predicted_s = float(factor.apply(run.predicted()).total_s)
    return {
        "run": run.name, "gpu": run.kind, "measured_s": run.step_s, "predicted_s": predicted_s,
        "error": predicted_s / run.step_s - 1, "basis": basis,
    }  # fmt: skip
