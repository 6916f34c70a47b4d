"""lakh plan place: which nodes of a cluster a job should use, in which order."""

from __future__ import annotations

from typing import Any

import click

from lakh.cli.complete import complete_clusters, complete_plan_models
from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan import FILE, MODEL_HELP, NUMBER

__all__ = ["place"]


@click.command()
@click.option("--model", required=True, shell_complete=complete_plan_models, help=MODEL_HELP)
@click.option(
    "--cluster",
    required=True,
    shell_complete=complete_clusters,
    help="Cluster file, or the name of one that ships with lakh.",
)
@click.option("--gpus", type=NUMBER, required=True, help="Number of GPUs of the job.")
@click.option("--tp", type=NUMBER, default=1, show_default=True, help="Tensor parallelism.")
@click.option("--pp", type=NUMBER, default=1, show_default=True, help="Pipeline stages.")
@click.option("--cp", type=NUMBER, default=1, show_default=True, help="Context parallelism.")
@click.option("--batch", type=NUMBER, help="Sequences per step  [default: 4M tokens]")
@click.option("--sequence", type=NUMBER, default=8192, show_default=True, help="Tokens per sequence.")
@click.option("--micro-batch", type=NUMBER, default=1, show_default=True)
@click.option(
    "--busy", type=click.FloatRange(0, 0.99), default=0.0, show_default=True, help="Share that other jobs use."
)
@click.option("--hosts", type=FILE, help="Nodes in the order of the cluster, one per line: NAME, or NAME busy.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the other jobs.")
@click.option("--out", type=FILE, help="Write the rank file: hosts in the order of their node ranks.")
@print_result
def place(
    model: str, cluster: str, gpus: int, busy: float, hosts: str | None, seed: int, out: str | None, **options: Any
) -> CommandResult:
    """Place a job on the free nodes of a cluster: fewest bytes between zones and racks."""
    from lakh import storage
    from lakh.cli.plan_model import planned_model
    from lakh.planner.estimate import check_plan
    from lakh.planner.placement.free_nodes import fragmented, read_hosts
    from lakh.planner.placement.place_job import compare_placements
    from lakh.planner.request import PlanRequest
    from lakh.trainer.launch.rank_file import rank_file_text

    asked = {"run": None, "model": model, "cluster": cluster, "gpus": gpus, "tokens": None}
    asked |= {name: options.pop(name) for name in ("batch", "sequence")}
    request = PlanRequest.of(asked, planned_model)
    plan = request.execution_plan(**options)
    check_plan(request.model, plan, request.cluster)
    free = read_hosts(hosts, request.cluster) if hosts else fragmented(request.cluster, busy, seed)
    found = compare_placements(request.model, plan, request.cluster, free.numbers, seed=seed)
    chosen = [free.names[node] for node in found.best.nodes.ravel()]
    if out:
        comment = (
            f"{model} on {gpus} GPUs of {request.cluster.name}, tp {int(plan.tp)} cp {int(plan.cp)} pp {int(plan.pp)}"
        )
        storage.write_bytes(out, rank_file_text(chosen, comment).encode())
    data = {
        "cut": found.cut,
        "tier": found.tier,
        "placement": found.best.strategy,
        **found.best.as_dict(),
        "baselines": {name: one.as_dict() for name, one in found.baselines.items()},
        "rank_file": out,
        "hosts": len(chosen),
        "free": len(free.numbers),
        "simulated": True,
    }
    return CommandResult(data, lambda: _page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    tiers = list(data["cuts_bytes"])
    rows = [
        (name, *(f"{one['cuts_bytes'][tier] / 1e9:,.1f}" for tier in tiers), f"{one['step_s']:.4g}")
        for name, one in [(data["placement"], data), *data["baselines"].items()]
    ]
    head = ["placement (simulated)", *(f"GB per step between {tier} groups" for tier in tiers), "step s"]
    lines = [f"{data['hosts']:,} of {data['free']:,} free nodes"]
    if data["rank_file"]:
        lines.append(f"wrote {data['rank_file']}: python -m lakh.trainer.torchrun --rank-file {data['rank_file']} ...")
    return Group(table(head, rows), *lines)
