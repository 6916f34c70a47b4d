"""Pictures of plans as PNG or SVG: roofline, Pareto front, goodput against the interval, sensitivity.

matplotlib is imported when a picture is asked for (the [plan] extra) and draws without a screen. A picture says that
its figures are simulated.
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
from lakh.planner.calibration import calibrated
from lakh.planner.goodput import Policy, Scene, daly_efficiency, simulate
from lakh.planner.hardware import hardware_of
from lakh.planner.layout import Layout
from lakh.planner.shape import Shape
from lakh.planner.steptime import gemm_s
from lakh.spec.cluster import Cluster

__all__ = ["goodput_curve", "pareto", "roofline", "tornado"]


def roofline(shape: Shape, layout: Layout, cluster: Cluster, path: Path) -> None:
    """The matrix products of a block on the GPU's roofline."""
    hw, fr = hardware_of(cluster), calibrated(hardware_of(cluster).kind)[0].fractions
    tokens = float(layout.micro_batch * layout.sequence / layout.cp)
    tp, h = float(layout.tp), float(shape.width)
    products = {
        "query, key, value": (tokens, h, float(shape.heads + 2 * shape.kv_heads) * float(shape.head_dim) / tp),
        "attention output": (tokens, float(shape.heads * shape.head_dim) / tp, h),
        "up": (tokens, h, (1 + float(shape.gated)) * float(shape.ffn) / tp),
        "down": (tokens, float(shape.ffn) / tp, h),
        "logits": (tokens, h, float(shape.vocab) / tp),
    }
    figure, axes = _figure("FLOP per byte", "TFLOP/s", f"{cluster.gpu.kind}: simulated")
    peak, memory_Bps = float(hw.peak_FLOPs), float(hw.memory_Bps)
    x = np.logspace(0, 4.5, 200)
    axes.loglog(x, np.minimum(peak, x * memory_Bps) / 1e12, color="black", label="roofline (data sheet)")
    for name, (m, k, n) in products.items():
        flops, traffic = 2 * m * k * n, 2 * (m * k + k * n + m * n)
        axes.plot(flops / traffic, flops / float(gemm_s(m, k, n, hw, fr, 1.0)) / 1e12, "o", label=name)
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


def goodput_curve(scene: Scene, policy: Policy, path: Path) -> None:
    figure, axes = _figure("seconds between checkpoints", "goodput", f"{scene.gpus:,} GPUs: simulated")
    grid = np.geomspace(20, 7200, 120)
    down = policy.detect_s + policy.restart_s
    axes.semilogx(grid, daly_efficiency(scene.mtbf_s, grid, policy.stall_s, down), label="exponential form (Daly)")
    points = np.geomspace(30, 7200, 9)
    shares = [simulate(scene, replace(policy, interval_s=float(s)), runs=300).goodput for s in points]
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
