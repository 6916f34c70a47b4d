"""What the planner says of a run's step time, written beside the measured ones."""

from __future__ import annotations

from lakh.errors import LakhError
from lakh.events import StepPredicted
from lakh.spec import Run
from lakh.spec.gpu import gpu_family

__all__ = ["predict_step"]

VENDORS = ("NVIDIA ", "AMD ", "Instinct ")


def predict_step(run: Run, ranks: int, device: str, *, step: int = 0) -> StepPredicted:
    """`device` is the name that the driver gives the GPU of a rank; empty on a CPU."""
    reason = _why_not(run, device)
    if reason:
        return _none(step, reason)
    try:
        from lakh.planner.estimate import estimate

        found = estimate(run, ranks)
    except LakhError as error:
        return _none(step, f"the planner refuses these settings: {error}")
    except ModuleNotFoundError as error:
        return _none(step, f"{error.name} is not installed: pip install 'lakh[plan]'")
    bar = found.error_bar
    basis = "; ".join(note.removeprefix("time: ") for note in found.notes)
    return StepPredicted(step=step, step_s=found.step_s, low_s=bar["low_s"], high_s=bar["high_s"], basis=basis)


def _why_not(run: Run, device: str) -> str:
    """The reason why the planner has nothing honest to say; empty if it has."""
    if run.workload != "code":
        return f"the planner has no step time of a {run.workload} run"
    if not device:
        return "the planner describes GPUs, and this run is on a CPU"
    name = device
    for vendor in VENDORS:
        name = name.removeprefix(vendor)
    planned = run.cluster.gpu.family
    if gpu_family(name) != planned:
        return f"the cluster of the settings has {planned}, this run is on {device}"
    return ""


def _none(step: int, reason: str) -> StepPredicted:
    return StepPredicted(step=step, step_s=None, low_s=None, high_s=None, basis=reason)
