"""Measured steps of lakh's own runs, and the factor that brings the planner to them.

A run folder (run.toml and events) gives the median step after its first steps; a CSV in the columns of points.csv gives
one run per row. The communication of a run is taken as predicted, and the rest of its step is measured over predicted:

    on_gpu = (measured step - predicted communication) / predicted work on the GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lakh import events
from lakh.errors import UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.measured_points import read_points
from lakh.planner.calibration.program_factor import OwnFactor
from lakh.planner.execution_plan import ExecutionPlan, plan_of_run
from lakh.planner.timing.step_time import GPU_PARTS, StepTime, step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model
from lakh.spec.run import load_run

__all__ = ["MeasuredRun", "own_factors", "read_runs"]

WARM_UP_STEPS = 3
"""First steps of each start of a run: compilation, allocation, the reading of data."""
LEAST_STEPS = 3


@dataclass(frozen=True)
class MeasuredRun:
    name: str
    model: Model
    plan: ExecutionPlan
    cluster: Cluster
    step_s: float
    steps: int
    """Measured steps, whose median is `step_s`."""

    @property
    def kind(self) -> str:
        return self.cluster.gpu.family

    def predicted(self) -> StepTime:
        """By the efficiencies of the GPU type, without a factor."""
        return step_time(self.model, self.plan, self.cluster, calibration_for(self.kind)[0].efficiency)

    @property
    def on_gpu(self) -> float:
        """Measured over predicted work on the GPU."""
        step = self.predicted()
        work_s = sum(float(getattr(step, name)) for name in GPU_PARTS)
        return (self.step_s - (float(step.total_s) - work_s)) / work_s


def read_runs(source: str | Path) -> list[MeasuredRun]:
    """The run of a folder, or the runs of a CSV."""
    if Path(source).is_dir():
        return [_read_folder(Path(source))]
    return [
        MeasuredRun(point.id, point.model, point.plan, point.cluster, point.step_s, 1)
        for point in read_points(source).kept
    ]


def _read_folder(folder: Path) -> MeasuredRun:
    if not (folder / "run.toml").is_file():
        raise UserError(str(folder), "has no run.toml", "give the folder of a run, as in: lakh train RUN --out DIR")
    run, started = load_run(str(folder / "run.toml")), None
    seconds: list[float] = []
    since_start = 0
    for event in events.read(folder, rank=0):
        if isinstance(event, events.RunStarted):
            started, since_start, seconds = event, 0, seconds if started and started.world == event.world else []
        elif isinstance(event, events.StepDone):
            since_start += 1
            if since_start > WARM_UP_STEPS and not event.compile_s:
                seconds.append(event.step_s)
    if started is None or len(seconds) < LEAST_STEPS:
        found = f"has {len(seconds)} measured steps after {WARM_UP_STEPS} steps of warm-up"
        raise UserError(str(folder), found, f"train at least {WARM_UP_STEPS + LEAST_STEPS} steps")
    plan, step_s = plan_of_run(run, started.world), float(np.median(seconds))
    return MeasuredRun(folder.name, run.model, plan, run.cluster, step_s, len(seconds))


def own_factors(runs: Sequence[MeasuredRun]) -> dict[str, OwnFactor]:
    """GPU type -> factor: the median of its runs."""
    factors = {}
    for kind in sorted({run.kind for run in runs}):
        found = [run.on_gpu for run in runs if run.kind == kind]
        if min(found) <= 0:
            name = next(run.name for run in runs if run.kind == kind and run.on_gpu <= 0)
            raise UserError(name, "a step takes less time than its predicted communication", "leave this run out")
        factors[kind] = OwnFactor(on_gpu=float(np.median(found)), low=min(found), high=max(found), runs=len(found))
    return factors
