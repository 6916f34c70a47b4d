"""lakh plan: the table of plan commands; each has its own file."""

from __future__ import annotations

import click

from lakh.cli.groups import LazyGroup

__all__ = ["PLANS", "plan"]

# name -> (where it is, what it does)
PLANS = {
    "estimate": ("lakh.cli.plan_estimate:estimate", "Memory, step time and cost of one layout, with an error bar."),
    "search": ("lakh.cli.plan_search:search", "The best of all layouts of a model on a cluster."),
    "cost": ("lakh.cli.plan_cost:cost", "GPUs for a deadline or days on a number of GPUs, with reserves and cost."),
    "goodput": ("lakh.cli.plan_goodput:goodput", "Goodput under failures, and the best checkpoint interval."),
    "hall": ("lakh.cli.plan_hall:hall", "How many GPUs a data hall holds, and what limits it."),
    "audit": ("lakh.cli.plan_audit:audit", "Recompute the claims of an article and mark each one."),
    "validate": ("lakh.cli.plan_validate:validate", "The planner's error on published measurements."),
    "calibrate": ("lakh.cli.plan_validate:calibrate", "Fit the planner to published measurements."),
}


@click.group(cls=LazyGroup, commands_table=PLANS)
def plan() -> None:
    """What a run costs, how fast it goes and whether it fits, before money is spent."""
