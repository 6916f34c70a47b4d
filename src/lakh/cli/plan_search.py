"""lakh plan search: the best of all layouts of a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan_options import request_options
from lakh.planner.execution_plan import CUDA_GRAPHS
from lakh.planner.request import PRECISIONS, plan_request

__all__ = ["search"]


@click.command()
@request_options
@click.option("--also-gpus", help="Further numbers of GPUs to try, e.g. 512,1024.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Deadline of the run.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="bf16", show_default=True)
@click.option("--graphs", type=click.Choice(CUDA_GRAPHS), default="none", show_default=True, help="CUDA graphs.")
@click.option("--trainable", is_flag=True, help="Only layouts that `lakh train` runs; implied by RUN.")
@click.option("--no-offload", is_flag=True, help="Keep optimizer states in GPU memory.")
@click.option("--prices", type=click.Path(dir_okay=False), help="Your own price book (TOML).")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the best plan as a run for `lakh train`.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Plot the Pareto front to this .png or .svg.")
@print_result
def search(
    run: str | None,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    sequence: int | None,
    tokens: float | None,
    also_gpus: str | None,
    days: float | None,
    precision: str,
    graphs: str,
    trainable: bool,
    no_offload: bool,
    prices: str | None,
    out: str | None,
    plot: str | None,
) -> CommandResult:
    """The best of all layouts of a model on a cluster."""
    request = plan_request(run, model, cluster, gpus, batch, sequence, tokens)
    found = request.search(
        also_gpus=also_gpus, days=days, precision=precision, graphs=graphs, trainable=trainable or bool(out),
        offload=not no_offload, prices=prices,
    )  # fmt: skip
    data: dict[str, Any] = {
        "searched": found.searched, "seconds": found.seconds, "best": found.best, "pareto": found.pareto,
        "why": found.why, "refused": found.refused, "simulated": True,
    }  # fmt: skip
    if plot and found.pareto:
        from lakh.planner.plots import pareto

        pareto(found.pareto, Path(plot))
        data["plot"] = plot
    if out and found.best_plan is not None:
        from lakh import config, storage

        storage.write_bytes(out, config.to_toml(request.run_of(found.best_plan)).encode())
        data["run"] = out
    return CommandResult(data, _page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    lines = [f"searched {data['searched']:,} layouts in {data['seconds']:.2f} s (simulated)", data["why"]]
    lines += [f"excluded, {why}: {n:,}" for why, n in data["refused"].items() if n]
    if data["best"] is None:
        return "\n".join(lines)
    bar = data["best"]["error_bar"]
    lines.append(f"80 % of held-out rows were within {bar['low_s']:.4g} to {bar['high_s']:.4g} s for such a step")
    rows = [
        [row["gpus"], row["name"], row["step_s"], row["usd_per_step"], round(row["memory_bytes"] / 2**30, 1)]
        + ([row["run_days"], f"{row['run_usd']:,.0f}"] if "run_days" in row else [])
        for row in data["pareto"]
    ]
    head = ["GPUs", "layout", "step s", "USD/step", "GiB"] + (["days", "USD"] if "run_days" in data["best"] else [])
    if "run" in data:
        lines.append(f"wrote {data['run']}: lakh train {data['run']}")
    return Group("\n".join(lines), table(head, rows, "Pareto front of time, cost and memory"))
