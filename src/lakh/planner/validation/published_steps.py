"""Steps of large published runs beside the same steps through the simulated network and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh import config
from lakh.planner.request import PlanRequest
from lakh.planner.step_simulation import simulate_step

__all__ = ["PublishedSteps", "compare_published", "load_published_steps"]

SHIPPED = Path(__file__).parents[1] / "data" / "published_steps.toml"


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    gpus: int
    cp: int
    sequence: int
    batch: int
    mfu: float


@dataclass(frozen=True, kw_only=True)
class PublishedPlan:
    """What all rows share, in the options of `lakh plan estimate`."""

    tp: int
    pp: int
    zero: int
    micro_batch: int
    schedule: str
    attention: str
    stages_inside: int
    context_overlap: int


@dataclass(frozen=True, kw_only=True)
class PublishedSteps:
    source: str
    model: str
    cluster: str
    program: str
    routing: str
    qps: int
    chunks: int
    plan: PublishedPlan
    rows: tuple[PublishedRow, ...]


def load_published_steps() -> PublishedSteps:
    return config.load(PublishedSteps, SHIPPED)


def compare_published(steps: PublishedSteps, chunks: int | None = None) -> list[dict[str, Any]]:
    """Predicted and published MFU of each row; `chunks` replaces the assumed number."""
    return [_compare(steps, row, chunks or steps.chunks) for row in steps.rows]


def _compare(steps: PublishedSteps, row: PublishedRow, chunks: int) -> dict[str, Any]:
    asked = {"run": None, "model": steps.model, "cluster": steps.cluster, "gpus": row.gpus, "tokens": None}
    request = PlanRequest.of(asked | {"batch": row.batch, "sequence": row.sequence})
    plan = request.execution_plan(steps.program, **vars(steps.plan), cp=row.cp, chunks=chunks)
    found = simulate_step(
        request.model, plan, request.cluster, program=steps.program, routing=steps.routing, qps=steps.qps
    )
    flops = request.model.flops_per_token(row.sequence, causal=False) * row.batch * row.sequence
    peak = request.cluster.gpu.peak_FLOPs * row.gpus
    simulated, closed = (flops / float(step.total_s) / peak for step in (found.simulated, found.closed))
    return {
        "gpus": row.gpus, "sequence": row.sequence, "cp": row.cp, "chunks": chunks, "published_mfu": row.mfu,
        "simulated_mfu": simulated, "closed_form_mfu": closed, "points": 100 * (simulated - row.mfu),
        "step_s": float(found.simulated.total_s), "nic_shares": vars(found.shares),
    }  # fmt: skip
