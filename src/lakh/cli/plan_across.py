"""lakh plan across: the best way to train one model on several sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lakh.cli.complete import complete_plan_models
from lakh.cli.output import CommandResult, console, print_result, table
from lakh.cli.plan import FILE, MODEL_HELP, NUMBER, plot_option, prices_option
from lakh.errors import UserError

if TYPE_CHECKING:
    from lakh.planner.across.sites import Sites

__all__ = ["across"]

STEP_TOKENS = 2**25
"""Tokens per step where no batch is given: what runs on tens of thousands of GPUs use."""
CELL_S = 20
"""Seconds of one cell of a study on a core of its own: three sites, 405B parameters (17 s on x86-64, 9 s for 70B)."""


@click.command()
@click.argument("sites")
@click.option(
    "--model",
    "models",
    required=True,
    multiple=True,
    shell_complete=complete_plan_models,
    help=f"{MODEL_HELP} Several with --study.",
)
@click.option("--batch", type=NUMBER, help="Sequences per step  [default: 32M tokens]")
@click.option("--sequence", type=NUMBER, default=8192, show_default=True, help="Tokens per sequence.")
@click.option(
    "--study", is_flag=True, help="Instead: the distribution of gains over a grid of links; 36 searches per model."
)
@click.option("--cells", type=FILE, help="With --study: keep finished cells in this file, and continue from it.")
@prices_option
@plot_option("the gains of --study")
@print_result
def across(
    sites: str, models: tuple[str, ...], batch: int | None, sequence: int, study: bool, cells: str | None,
    prices: str | None, plot: str | None,
) -> CommandResult:  # fmt: skip
    """Find the best placement, schedule and network to train a model on several sites.

    SITES is a file that describes them, or the name of one that ships with lakh, e.g. three-regions.
    """
    from dataclasses import asdict

    from lakh.cli.plan_model import planned_model
    from lakh.planner.across.across_plan import plan_across
    from lakh.planner.across.sites import load_sites

    for name, value in (("--plot", plot), ("--cells", cells)):
        if value and not study:
            raise UserError(f"{name} {value}", "belongs to a study", "add --study")
    if len(models) > 1 and not study:
        raise UserError("--model", f"got {len(models)} models", "give one, or add --study")
    place = load_sites(sites)
    batch = batch or max(STEP_TOKENS // sequence, 1)
    asked = {"sites": place.name, "batch": batch, "sequence": sequence}
    if study:
        return _study(place, models, asked, cells, plot)
    with console().status("sites") as status:
        what = planned_model(models[0])
        found = plan_across(what, place, batch=batch, sequence=sequence, prices=prices, progress=status.update)
    data = {**asdict(found), **asked, "model": models[0], "simulated": True}
    return CommandResult(data, lambda: _page(data))


def _study(
    place: Sites, models: tuple[str, ...], asked: dict[str, Any], cells: str | None, plot: str | None
) -> CommandResult:
    from pathlib import Path

    from lakh.cli.plan_model import planned_model
    from lakh.planner.across.study import StudyCells, StudyGrid, study_links

    grid = StudyGrid(models={name: planned_model(name) for name in models})
    kept = StudyCells(asked, Path(cells) if cells else None)
    screen, left = console(), sum(key not in kept.rows for key in grid.keys)
    if left:
        again = "" if cells else "; --cells FILE keeps finished cells, so that an interrupted study can continue"
        screen.print(f"{left} of {len(grid.keys)} cells to search, about {CELL_S} s each on a free core{again}")
    with screen.status("cells") as status:
        data = study_links(
            grid, place, batch=asked["batch"], sequence=asked["sequence"], cells=kept, progress=status.update
        )
    if plot:
        from lakh.planner.plots import gain_map

        gain_map(data["cells"], Path(plot))
        data["plot"] = plot
    return CommandResult({**data, **asked, "models": list(models)}, lambda: _study_page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    best, built = data["best"], data["best_as_built"]
    rows = [
        ("best", best),
        *([("best, links as they are", built)] if built != best else []),
        *data["baselines"].items(),
    ]
    lines = [
        f"{data['searched']:,} combinations in {data['seconds']:.0f} s; all times are simulated",
        f"the best step is {data['gain']['production']:.0%} shorter than the production default's"
        f" ({data['gain_as_built']['production']:.0%} with the links as they are)",
        f"why: {data['why']}",
        *(f"note: {note}" for note in data["notes"]),
    ]
    pages = [
        "\n".join(lines),
        table(["", "step s", "USD/step", "placement", "layout", "schedule", "network"], [_row(*row) for row in rows]),
        table(["GPUs", "step s", "USD/step", "placement", "more wavelengths"], _front(data), "Pareto front"),
    ]
    if data["flagged"]:
        flagged = [(f"{row['step_s']:.4g}", row["flag"]) for row in data["flagged"]]
        pages.append(table(["step s", "faster, but"], flagged))
    return Group(*pages)


def _row(name: str, one: dict[str, Any]) -> tuple[str, ...]:
    axes = [f"{axis} {one[axis]}" for axis in ("tp", "pp", "cp", "ep") if one[axis] > 1]
    layout = f"{' '.join(axes) or 'dp'}, zero-{one['zero']}, micro-batch {one['micro_batch']}"
    schedule = one["schedule"] + (f" x {one['chunks']}" if one["chunks"] > 1 else "")
    network = f"{one['routing']}, {one['qps']} QPs, {one['transport']}"
    if one["extra_wavelengths"]:
        network += f", {one['extra_wavelengths']} more wavelengths"
    return name, f"{one['step_s']:.4g}", f"{one['usd_per_step']:.4g}", one["placement"], layout, schedule, network


def _front(data: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{row['gpus']:,}", f"{row['step_s']:.4g}", f"{row['usd_per_step']:.4g}", row["placement"],
         str(row["extra_wavelengths"]))
        for row in data["pareto"]
    ]  # fmt: skip


def _study_page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    cells = [
        (row["model"], f"1:{row['oversubscription']:g}", f"{row['rtt_ms']:.3g}", f"{row['loss']:g}", row["crossing"],
         row["schedule"], f"{row['production_s']:.4g}", f"{row['best_s']:.4g}", f"{row['gain']['production']:.0%}")
        for row in data["cells"]
    ]  # fmt: skip
    head = ["model", "oversubscription", "RTT ms", "loss", "what crosses", "schedule", "production s", "best s", "gain"]
    scopes = {"all": data["gain"], **(data["by_model"] if len(data["by_model"]) > 1 else {})}
    gains = [
        (scope, name, *(f"{value:.0%}" for value in row.values()))
        for scope, found in scopes.items()
        for name, row in found.items()
    ]
    return Group(
        table(head, cells, "Simulated; layouts are tuned in every cell"),
        table(["model", "gain over", "min", "p25", "median", "p75", "max"], gains),
    )
