"""lakh plan hall: how many GPUs a data hall holds, and what limits it."""

from __future__ import annotations

from dataclasses import asdict

import click

from lakh.cli.output import CommandResult, print_result, table

__all__ = ["hall"]


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--cooling", type=click.Choice(["air", "liquid"]), default="air", show_default=True)
@click.option("--move", "moved", multiple=True, help="Support service to move to another hall. Repeatable.")
@click.option("--map", "with_map", is_flag=True, help="Print the floor plan: zones as digits, N network, S services.")
@print_result
def hall(file: str | None, cooling: str, moved: tuple[str, ...], with_map: bool) -> CommandResult:
    """Compute how many GPUs a data hall holds, and what limits it."""
    from rich.console import Group

    from lakh.planner.facility.hall import fill_hall, load_hall, scenarios

    described = load_hall(file)
    if moved or cooling != "air":
        name = f"{cooling}, without {', '.join(moved)}" if moved else cooling
        found = [fill_hall(described, cooling="liquid" if cooling == "liquid" else "air", moved=moved, scenario=name)]
    else:
        found = scenarios(described)
    data = {"hall": described.name, "source": described.source, "simulated": True, "fills": [asdict(f) for f in found]}
    facts: dict[str, list[object]] = {
        "GPUs": [f"{f.gpus:,}" for f in found],
        "largest zone": [f"{f.zones[0]:,}" if f.zones else 0 for f in found],
        "GPU racks": [f.gpu_racks for f in found],
        "servers per rack": [f.servers_per_rack for f in found],
        "network racks": [f.network_racks for f in found],
        "support racks": [f.support_racks for f in found],
        "power, kW": [f"{f.power_kW:,.0f}" for f in found],
        "longest cable, m": [f"{f.longest_cable_m:.0f}" for f in found],
    }
    numbers = [str(number) for number in range(1, len(found) + 1)]  # a scenario's name is too wide for a column
    rows = [[name, *values] for name, values in facts.items()]
    legend = [f"{number}  {f.scenario}: {f.binds} binds" for number, f in zip(numbers, found, strict=True)]
    pages = [table(["", *numbers], rows, f"{described.name}: simulated, {described.source}"), "\n".join(legend)]
    return CommandResult(data, Group(*pages, *(["\n".join(found[-1].placement)] if with_map else [])))
