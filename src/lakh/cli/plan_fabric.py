"""lakh plan fabric: a collective on a cluster's network, under a routing policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, console, print_result, table
from lakh.cli.plan import NUMBER, plot_option

__all__ = ["fabric"]

ROUTINGS = ["ecmp", "pinned", "e-ecmp", "te", "flowlet", "spray"]
COUNT = click.IntRange(min=0)


@click.command()
@click.option("--cluster", required=True, help="Cluster file, or the name of one that ships with lakh.")
@click.option("--gpus", type=NUMBER, required=True, help="GPUs of one job: whole nodes.")
@click.option("--qps", type=click.IntRange(1, 64), default=4, show_default=True, help="Queue pairs per connection.")
@click.option(
    "--split-messages", is_flag=True, help="Split messages over the queue pairs  [default: whole messages in turn]"
)
@click.option("--routing", type=click.Choice(ROUTINGS), default="e-ecmp", show_default=True)
@click.option(
    "--order", type=click.Choice(["rack", "random"]), default="rack", show_default=True, help="Of nodes in a ring."
)
@click.option(
    "--collective",
    type=click.Choice(["ring", "halving-doubling", "all-to-all", "send"]),
    default="ring",
    show_default=True,
)
@click.option("--size", "size_bytes", type=click.FloatRange(min=1), default=2.0**30, help="Bytes  [default: 1 GiB]")
@click.option("--pfc", is_flag=True, help="PFC without congestion control  [default: ideal congestion control]")
@click.option("--jobs", type=NUMBER, default=1, show_default=True, help="Jobs of this size at the same time.")
@click.option("--fragmented", is_flag=True, help="Deal the nodes of each rack to different jobs.")
@click.option("--dead-links", type=COUNT, default=0, help="Dead uplinks of leaf switches, at random.")
@click.option("--dead-switches", type=COUNT, default=0, help="Dead switches above the leaves, in the first zone.")
@click.option("--slow-nics", type=COUNT, default=0, help="NICs at a quarter of their rate, at random.")
@click.option("--uplinks", type=NUMBER, help="Uplinks of a leaf switch  [default: of the cluster file]")
@click.option("--in-flight", "in_flight_bytes", type=click.FloatRange(min=1), help="Admitted bytes per connection.")
@click.option("--loss", type=float, default=0.0, help="Packet loss on the outermost tier, e.g. 1e-5.")
@click.option(
    "--transport",
    type=click.Choice(["go-back-n", "selective-repeat", "erasure-coding"]),
    default="selective-repeat",
    show_default=True,
    help="Reaction to loss.",
)
@click.option("--seed", type=COUNT, default=1, show_default=True, help="Of hashes, random order and faults.")
@plot_option("the load of the uplinks")
@print_result
def fabric(cluster: str, plot: str | None, **options: Any) -> CommandResult:
    """Simulate a collective on a cluster's network under a routing policy."""
    from lakh.planner.fabric.simulation import FabricScenario, simulate_fabric
    from lakh.spec.cluster import load_cluster

    screen, place = console(), load_cluster(cluster)
    scenario = FabricScenario(**options)
    report = simulate_fabric(place, scenario, progress=screen.print)
    data = {**report.as_dict(), "cluster": place.name, "scenario": vars(scenario)}
    if plot:
        from lakh.planner.plots import link_heat_map

        link_heat_map(report.heat, Path(plot))
        data["plot"] = plot
    return CommandResult(data, lambda: _page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    share = data["ideal_s"] / data["time_s"]
    rows = [
        ("cluster", data["cluster"]),
        ("flows", f"{data['flows']:,} of {data['pairs']:,} pairs of GPUs"),
        ("time", f"{_seconds(data['time_s'])}; without contention {_seconds(data['ideal_s'])}: {share:.1%} of ideal"),
        ("bus bandwidth", f"{data['bus_GBps']:.1f} GB/s"),
        ("slowest pair", f"{data['min_fraction']:.1%} of a NIC"),
        ("mean of all pairs", f"{data['mean_fraction']:.1%} of a NIC"),
        *(("note", note) for note in data["notes"]),
        ("simulated in", f"{data['seconds']:.2f} s"),
    ]
    links = [
        (row["link"], row["flows"], f"{row['load_GBps']:.1f}", f"{row['capacity_GBps']:.1f}")
        for row in data["binding_links"]
    ]
    load = [
        (row["links"], row["used"], f"{row['mean']:.0%}", f"{row['p95']:.0%}", f"{row['max']:.0%}", row["saturated"])
        for row in data["link_load"]
    ]
    slow = [(row["source"], row["target"], f"{row['fraction']:.1%}") for row in data["slowest"]]
    pages = [
        table(["simulated", "value"], rows),
        table(["binding link, slowest first", "flows", "GB/s", "of GB/s"], links),
        table(["links", "in use", "mean load", "p95", "max", "saturated"], load),
        table(["from GPU", "to GPU", "of a NIC"], slow, "slowest pairs"),
    ]
    if len(data["jobs"]) > 1:
        jobs = [
            (number, _seconds(row["time_s"]), f"{row['min_fraction']:.1%}", f"{row['mean_fraction']:.1%}")
            for number, row in enumerate(data["jobs"], start=1)
        ]
        pages.append(table(["job", "time", "slowest pair", "mean"], jobs))
    return Group(*pages)


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"
