"""Plots as PNG or SVG: roofline, Pareto front, goodput over the checkpoint interval, sensitivity, link load.

matplotlib (the [plan] extra) is imported on use and needs no display. Every plot says that its figures are simulated.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import MissingExtra, UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.reliability.goodput import FailureScenario, RecoveryPolicy, daly_efficiency, simulate
from lakh.planner.stacked import Array
from lakh.planner.timing.gemm import gemm_s
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["gain_map", "goodput_curve", "link_heat_map", "pareto", "roofline", "tornado"]


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
    x = np.logspace(0, 4.5, 200)
    roof = np.minimum(gpu.peak_FLOPs, x * gpu.memory_Bps) / 1e12
    with _plot(path, "FLOP per byte", "TFLOP/s", f"{gpu.kind}: simulated") as axes:
        axes.loglog(x, roof, color="black", label="roofline (data sheet)")
        for name, (m, k, n) in products.items():
            flops, traffic = 2 * m * k * n, 2 * (m * k + k * n + m * n)
            axes.plot(flops / traffic, flops / float(gemm_s(m, k, n, gpu, efficiency)) / 1e12, "o", label=name)


def pareto(rows: Sequence[dict[str, Any]], path: Path) -> None:
    x = [row["step_s"] for row in rows]
    y = [row["memory_bytes"] / 2**30 for row in rows]
    with _plot(path, "seconds per step", "GiB on the fullest GPU", "Pareto front: simulated") as axes:
        axes.plot(x, y, "o-")
        for a, b, row in zip(x, y, rows, strict=True):
            axes.annotate(f"{row['gpus']} GPUs, tp{row['tp']} pp{row['pp']}", (a, b), fontsize=7)


def goodput_curve(scenario: FailureScenario, policy: RecoveryPolicy, path: Path) -> None:
    grid, points = np.geomspace(20, 7200, 120), np.geomspace(30, 7200, 9)
    exact = daly_efficiency(scenario.mtbf_s, grid, policy.stall_s, policy.down_s)
    with _plot(path, "seconds between checkpoints", "goodput", f"{scenario.gpus:,} GPUs: simulated") as axes:
        axes.semilogx(grid, exact, label="exponential form (Daly)")
        shares = [simulate(scenario, replace(policy, interval_s=float(s)), runs=300).goodput for s in points]
        axes.plot(points, shares, "o", label="Monte Carlo, this policy")


def tornado(rows: Sequence[dict[str, Any]], path: Path) -> None:
    names = [row["lever"] for row in rows][::-1]
    with _plot(path, "change of the cost, USD", "", "20 % less or more of each: simulated") as axes:
        for side in ("less", "more"):
            axes.barh(names, [row[f"usd_{side}"] for row in rows][::-1], label=side)


def link_heat_map(utilisation: Array, path: Path) -> None:
    """Load of the uplinks of every leaf switch."""
    with _plot(path, "uplink of the leaf", "leaf switch", "load of the uplinks: simulated") as axes:
        axes.grid(visible=False)
        shown = axes.imshow(utilisation, aspect="auto", interpolation="nearest", cmap="inferno", vmin=0, vmax=1)
        axes.figure.colorbar(shown, label="share of the link's rate")


def gain_map(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Gain over the production default by oversubscription, loss and distance, and the axis that crosses; one map for
    each model."""
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    rows = sorted({cell["oversubscription"] for cell in cells})
    columns = sorted({(cell["loss"], cell["distance_km"]) for cell in cells})
    most = max(0.01, *(cell["gain"]["production"] for cell in cells))
    with _figure(path, (9.0, 1.2 + 2.8 * len(models))) as figure:
        figure.suptitle("step time saved against the production default: simulated")
        for number, model in enumerate(models, start=1):
            axes = figure.add_subplot(len(models), 1, number, title=model, ylabel="oversubscription")
            gains = np.full((len(rows), len(columns)), np.nan)
            for cell in cells:
                if cell["model"] != model:
                    continue
                row = rows.index(cell["oversubscription"])
                column = columns.index((cell["loss"], cell["distance_km"]))
                gain = gains[row, column] = cell["gain"]["production"]
                text = f"{gain:.0%}\n" + cell["crossing"].replace(" and ", "\nand ")
                colour = "white" if gain > 0.7 * most else "black"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
            axes.set_xticks(range(len(columns)), [f"{km:g} km\nloss {loss:g}" for loss, km in columns], fontsize=7)
            axes.set_yticks(range(len(rows)), [f"1:{over:g}" for over in rows])
            shown = axes.imshow(gains, aspect="auto", cmap="YlGn", vmin=0, vmax=most)
            figure.colorbar(shown, ax=axes, label="share of the step")


@contextmanager
def _plot(path: Path, x: str, y: str, title: str) -> Iterator[Any]:
    """The axes of a figure that is written to `path`."""
    with _figure(path, (7, 4.5)) as figure:
        axes = figure.add_subplot(xlabel=x, ylabel=y, title=title)
        axes.grid(alpha=0.3)
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()


@contextmanager
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure that is written to `path`."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg"):
        raise UserError(f"--plot {path}", "is neither .png nor .svg", "choose one of them")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra("--plot", "matplotlib", "plan") from None
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=120)
    storage.write_bytes(path, data.getvalue())
