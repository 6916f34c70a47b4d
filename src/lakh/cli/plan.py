"""lakh plan: the table of plan commands, and options that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from lakh.cli.groups import LazyGroup

__all__ = ["PLANS", "plan"]

# name -> (where it is, what it does)
PLANS = {
    "estimate": ("lakh.cli.plan_layout:estimate", "Estimate memory, step time and cost of one layout."),
    "search": ("lakh.cli.plan_layout:search", "Find the best of all layouts of a model on a cluster."),
    "cost": ("lakh.cli.plan_cost:cost", "Compute GPUs for a deadline, or days on a number of GPUs, and the cost."),
    "goodput": ("lakh.cli.plan_goodput:goodput", "Simulate goodput under failures; find the best checkpoint interval."),
    "schedule": (
        "lakh.cli.plan_schedule:schedule",
        "Simulate pipeline schedules: step time, bubble and activations in flight.",
    ),
    "step": ("lakh.cli.plan_step:step", "Simulate one step: its flows on the network, its pipeline as a timeline."),
    "fabric": ("lakh.cli.plan_fabric:fabric", "Simulate a collective on a cluster's network under a routing policy."),
    "place": (
        "lakh.cli.plan_place:place",
        "Place a job on the free nodes of a cluster: fewest bytes between zones and racks.",
    ),
    "tiers": (
        "lakh.cli.plan_tiers:tiers",
        "Time all orders of the axes of parallelism on the tiers of a network; compare clusters for one job.",
    ),
    "across": (
        "lakh.cli.plan_across:across",
        "Find the best placement, schedule and network to train a model on several sites.",
    ),
    "chakra": (
        "lakh.cli.plan_interchange:chakra",
        "Write a step as Chakra execution traces; time traces on a cluster.",
    ),
    "infragraph": ("lakh.cli.plan_interchange:infragraph", "Convert the network of a cluster to InfraGraph, and back."),
    "hall": ("lakh.cli.plan_hall:hall", "Compute how many GPUs a data hall holds, and what limits it."),
    "audit": ("lakh.cli.plan_audit:audit", "Recompute the claims of an article and mark each one."),
    "validate": ("lakh.cli.plan_validate:validate", "Measure the planner's error on published measurements."),
    "calibrate": (
        "lakh.cli.plan_validate:calibrate",
        "Fit the planner to published measurements, or to your own runs.",
    ),
}
NUMBER = click.IntRange(min=1)
FILE = click.Path(dir_okay=False)
MODEL_HELP = (
    "Model of the catalogue, a .toml file with the settings of [model], a Hugging Face directory or a GGUF file."
)

owned_option = click.option("--owned", is_flag=True, help="Price owned GPUs instead of rented ones.")
prices_option = click.option("--prices", type=FILE, help="Your own price book (TOML).")
failures_option = click.option(
    "--failures", default="llama3", show_default=True, help="Failure rates: a preset, or a .toml file."
)


def plot_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--plot", type=FILE, help=f"Plot {what} to this .png or .svg file.")


def add_options(options: list[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(cls=LazyGroup, commands_table=PLANS)
def plan() -> None:
    """Estimate cost, speed and memory of a run before it starts."""
