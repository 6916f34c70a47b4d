"""Plots as PNG or SVG: roofline, Pareto front, goodput over the checkpoint interval, sensitivity.

matplotlib (the [plan] extra) is imported on use and needs no display. Every plot says that its figures are simulated.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import MissingExtra, UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.reliability.goodput import FailureScenario, RecoveryPolicy, daly_efficiency, simulate
from lakh.planner.timing.gemm import gemm_s
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["goodput_curve", "pareto", "roofline", "tornado"]


def roofline(model: Model, plan: ExecutionPlan, cluster: Cluster, path: Path) -> None:
    """The matrix products of a block on the GPU's roofline."""
    gpu, efficiency = cluster.gpu, calibration_for(cluster.gpu.family)[0].efficiency
    tokens = float(plan.micro_batch * plan.sequence / plan.cp)
    tp, h = float(plan.tp), float(model.width)
    products = {
        "query, key, value": (tokens, h, (model.heads + 2 * model.kv_heads) * model.head_dim / tp),
        "attention output": (tokens, model.heads * model.head_dim / tp, h),
        "up": (tokens, h, (model.ffn_matrices - 1) * model.ffn / tp),
        "down": (tokens, model.ffn / tp, h),
        "logits": (tokens, h, model.vocab / tp),
    }
    figure, axes = _figure("FLOP per byte", "TFLOP/s", f"{gpu.kind}: simulated")
    x = np.logspace(0, 4.5, 200)
    axes.loglog(x, np.minimum(gpu.peak_FLOPs, x * gpu.memory_Bps) / 1e12, color="black", label="roofline (data sheet)")
    for name, (m, k, n) in products.items():
        flops, traffic = 2 * m * k * n, 2 * (m * k + k * n + m * n)
        axes.plot(flops / traffic, flops / float(gemm_s(m, k, n, gpu, efficiency)) / 1e12, "o", label=name)
    axes.legend()
    _save(figure, path)


def pareto(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure, axes = _figure("seconds per step", "GiB on the fullest GPU", "Pareto front: simulated")
    x = [row["step_s"] for row in rows]
    y = [row["memory_bytes"] / 2**30 for row in rows]
    axes.plot(x, y, "o-")
    for a, b, row in zip(x, y, rows, strict=True):
        axes.annotate(f"{row['gpus']} GPUs, tp{row['tp']} pp{row['pp']}", (a, b), fontsize=7)
    _save(figure, path)


def goodput_curve(scenario: FailureScenario, policy: RecoveryPolicy, path: Path) -> None:
    figure, axes = _figure("seconds between checkpoints", "goodput", f"{scenario.gpus:,} GPUs: simulated")
    grid = np.geomspace(20, 7200, 120)
    exact = daly_efficiency(scenario.mtbf_s, grid, policy.stall_s, policy.down_s)
    axes.semilogx(grid, exact, label="exponential form (Daly)")
    points = np.geomspace(30, 7200, 9)
    shares = [simulate(scenario, replace(policy, interval_s=float(s)), runs=300).goodput for s in points]
    axes.plot(points, shares, "o", label="Monte Carlo, this policy")
    axes.legend()
    _save(figure, path)


def tornado(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure, axes = _figure("change of the cost, USD", "", "20 % less or more of each: simulated")
    names = [row["lever"] for row in rows][::-1]
    axes.barh(names, [row["usd_less"] for row in rows][::-1], label="less")
    axes.barh(names, [row["usd_more"] for row in rows][::-1], label="more")
    axes.legend()
    _save(figure, path)


def _figure(x: str, y: str, title: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra("--plot", "matplotlib", "plan") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg"):
        raise UserError(f"--plot {path}", "is neither .png nor .svg", "choose one of them")
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=120)
    storage.write_bytes(path, data.getvalue())
