"""lakh plan search: the best of all layouts of a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan_question import PRECISIONS, ask, numbers, question_options
from lakh.planner.layout import GRAPHS

__all__ = ["search"]


@click.command()
@question_options
@click.option("--also-gpus", help="More numbers of GPUs to try, e.g. 512,1024.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="The run must end within so many days.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="bf16", show_default=True)
@click.option("--graphs", type=click.Choice(GRAPHS), default="none", show_default=True, help="CUDA graphs.")
@click.option("--trainable", is_flag=True, help="Only layouts that `lakh train` runs; implied by RUN.")
@click.option("--no-offload", is_flag=True, help="Leave optimizer states in GPU memory.")
@click.option("--prices", type=click.Path(dir_okay=False), help="A price book of your own (TOML).")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the winner as a run that `lakh train` takes.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the Pareto front into this .png or .svg.")
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
    from lakh.errors import UserError
    from lakh.planner.candidates import Limits
    from lakh.planner.hardware import kind_of
    from lakh.planner.prices import load_prices
    from lakh.planner.search import search as find

    question = ask(run, model, cluster, gpus, batch, sequence, tokens)
    if days and not question.tokens:
        raise UserError("--days", "needs the length of the run", "give --tokens too")
    counts = tuple(sorted({question.gpus, *(numbers(also_gpus, "--also-gpus") if also_gpus else ())}))
    if counts[-1] > question.cluster.gpus:
        raise UserError(f"cluster {question.cluster.name}", f"has {question.cluster.gpus:,} GPUs", "ask for fewer")
    limits = Limits(
        batch=question.batch, sequence=question.sequence, gpus=counts, tokens=question.tokens, days=days,
        low_precision=PRECISIONS[precision], graphed=float(GRAPHS.index(graphs)), offload=not no_offload,
        trainable=trainable or bool(out) or (question.run is not None and question.run.model.is_plain),
    )  # fmt: skip
    rented = load_prices(prices).rented.get(kind_of(question.cluster.gpu.kind))
    found = find(question.shape, question.cluster, limits, rented.usd_per_gpu_hour if rented else 0.0)
    data: dict[str, Any] = {
        "searched": found.searched, "seconds": found.seconds, "best": found.best, "pareto": found.pareto,
        "why": found.why, "refused": found.refused, "simulated": True,
    }  # fmt: skip
    if plot and found.pareto:
        from lakh.planner.plots import pareto

        pareto(found.pareto, Path(plot))
        data["plot"] = plot
    if out and found.best_layout is not None:
        data["run"] = _write(question, found.best_layout, model or "plan", out)
    return CommandResult(data, _page(data))


def _write(question: Any, layout: Any, name: str, out: str) -> str:
    from lakh import config, storage
    from lakh.planner.torun import run_of, with_layout

    if question.run is not None:
        run = with_layout(question.run, layout, question.cluster)
    else:
        tokens = question.tokens or 20 * float(question.shape.parameters)
        run = run_of(name, question.model, layout, question.cluster, tokens=tokens)
    storage.write_bytes(out, config.to_toml(run).encode())
    return out


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    words = [f"searched {data['searched']:,} layouts in {data['seconds']:.2f} s (simulated)", data["why"]]
    words += [f"left out, {why}: {n:,}" for why, n in data["refused"].items() if n]
    if data["best"] is None:
        return "\n".join(words)
    bar = data["best"]["error_bar"]
    words.append(f"8 of 10 held-out rows lay within {bar['low_s']:.4g} to {bar['high_s']:.4g} s for such a step")
    rows = [
        [row["gpus"], row["name"], row["step_s"], row["usd_per_step"], round(row["memory_bytes"] / 2**30, 1)]
        + ([row["run_days"], f"{row['run_usd']:,.0f}"] if "run_days" in row else [])
        for row in data["pareto"]
    ]
    head = ["GPUs", "layout", "step s", "USD/step", "GiB"] + (["days", "USD"] if "run_days" in data["best"] else [])
    if "run" in data:
        words.append(f"wrote {data['run']}: lakh train {data['run']}")
    return Group("\n".join(words), table(head, rows, "Pareto front of time, cost and memory"))
