"""lakh plan hall: how many GPUs a data hall holds, and what limits it."""

from __future__ import annotations

from dataclasses import asdict

import click

from lakh.cli.face import Answer, answers, table

__all__ = ["hall"]


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--cooling", type=click.Choice(["air", "liquid"]), default="air", show_default=True)
@click.option(
    "--move", "moved", multiple=True, help="A service that moves to another hall; may be given several times."
)
@click.option("--map", "with_map", is_flag=True, help="Draw the floor: zones as digits, N network, S services.")
@answers
def hall(file: str | None, cooling: str, moved: tuple[str, ...], with_map: bool) -> Answer:
    """How many GPUs a data hall holds, and what limits it."""
    from rich.console import Group

    from lakh.planner.hall import fill, load_hall, scenarios

    described = load_hall(file)
    if moved or cooling != "air":
        name = f"{cooling}, without {', '.join(moved)}" if moved else cooling
        found = [fill(described, cooling="liquid" if cooling == "liquid" else "air", moved=moved, scenario=name)]
    else:
        found = scenarios(described)
    data = {"hall": described.name, "source": described.source, "simulated": True, "fills": [asdict(f) for f in found]}
    rows = [
        [f.scenario, f.gpus, f.zones[0] if f.zones else 0, f.gpu_racks, f.servers_per_rack, f.network_racks,
         f.support_racks, round(f.power_kW), f"{f.longest_cable_m:.0f}", f.binds]
        for f in found
    ]  # fmt: skip
    head = [
        "scenario",
        "GPUs",
        "largest zone",
        "GPU racks",
        "servers/rack",
        "network racks",
        "services",
        "kW",
        "cable m",
        "binds",
    ]
    page = table(head, rows, f"{described.name}: simulated, {described.source}")
    return Answer(data, Group(page, "\n".join(found[-1].placement)) if with_map else page)
