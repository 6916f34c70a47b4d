"""lakh dlrm: recommendation models with sharded embedding tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lakh.cli.groups import LazyGroup
from lakh.cli.output import CommandResult, print_result, table
from lakh.errors import InfeasiblePlan, UserError

if TYPE_CHECKING:
    from lakh.planner.embedding.sharding import ShardingResult

__all__ = ["DLRM", "dlrm", "plan"]

# name -> (where it is, what it does)
DLRM = {
    "plan": ("lakh.cli.dlrm:plan", "Plan the sharding of embedding tables, with a lower bound."),
    "train": ("lakh.cli.dlrm_train:train", "Train a recommendation model and measure its AUC."),
    "demo": (
        "lakh.cli.dlrm_train:demo",
        "Train a recommendation model on two ranks and kill one of them.",
    ),
}
BAR_CHARS = 40
SHOWN_RANKS = 32  # more ranks are shown as the slowest and the fastest of them


@click.group(cls=LazyGroup, commands_table=DLRM)
def dlrm() -> None:
    """Plan and train recommendation models with sharded embedding tables."""


@click.command()
@click.argument("tables")
@click.option("--cluster", help="Cluster file, or the name of one that ships with lakh; TorchRec statistics need none.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to use  [default: all GPUs of the cluster]")
@click.option("--batch", type=click.IntRange(min=1), default=512, show_default=True, help="Samples per rank and step.")
@click.option("--min-width", type=click.IntRange(min=4), default=32, show_default=True, help="Narrowest column slice.")
@click.option("--cost-model", type=click.Choice(["cluster", "torchrec"]), default="cluster", show_default=True)
@click.option("--memory-share", type=click.FloatRange(0, 1, min_open=True), default=0.85, show_default=True,
              help="Share of a GPU's memory for tables.")  # fmt: skip
@click.option("--host-gib", type=click.FloatRange(min=0), default=0.0, help="Host memory per rank for tables, GiB.")
@click.option("--file-gib", type=click.FloatRange(min=0), default=0.0, help="Disk per rank for tables, GiB.")
@click.option("--milp-seconds", type=click.FloatRange(min=0), default=10.0, show_default=True,
              help="Time limit of the MILP solver, which small sets use; 0 disables it.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False), help="Write the plan as JSON.")
@print_result
def plan(tables: str, out: str | None, **options: Any) -> CommandResult:
    """Plan the sharding of embedding tables, with a lower bound.

    TABLES is a file of tables (TOML or JSON), configs of an EmbeddingBagCollection (JSON), the statistics that
    TorchRec's planner prints, or a set that ships with lakh: mlperf-dcnv2.
    """
    from lakh.planner.embedding.tables import read_text
    from lakh.planner.embedding.torchrec_stats import is_torchrec_stats

    text, origin = read_text(tables)
    published = None
    if is_torchrec_stats(text):
        found, published = _plan_statistics(text, origin, options)
    else:
        found = _plan_tables(text, origin, options)
    data = _document(found)
    if published:
        data["published"] = {"bottleneck_ms": published, "ratio": published / found.bottleneck_ms}
    if out:
        import json

        from lakh import storage

        storage.write_bytes(out, json.dumps(data).encode())
        data["file"] = out
    return CommandResult(data, lambda: _page(data))


def _plan_statistics(text: str, origin: str, options: dict[str, Any]) -> tuple[ShardingResult, float]:
    """Plan TorchRec's tables on its ranks with its costs; a cluster is only checked for its size."""
    from lakh.planner.embedding.sharding import plan_sharding
    from lakh.planner.embedding.torchrec_stats import read_torchrec_stats
    from lakh.spec.cluster import load_cluster

    node_size = 8
    cluster = load_cluster(options["cluster"]) if options["cluster"] else None
    if cluster:
        node_size = cluster.node_size
    stats = read_torchrec_stats(text, min_width=options["min_width"], node_size=node_size, origin=origin)
    ranks = stats.limits.ranks
    if options["ranks"] not in (None, ranks):
        found = f"the costs of {origin} are those of {ranks} ranks"
        raise UserError(f"--ranks {options['ranks']}", found, "omit --ranks, or describe the tables in TOML")
    if cluster and cluster.gpus < ranks:
        found = f"has {cluster.gpus} GPUs, {origin} describes {ranks} ranks"
        raise UserError(f"--cluster {options['cluster']}", found, "choose a larger cluster, or omit --cluster")
    found_plan = plan_sharding(stats.tables, stats, stats.limits, milp_time_s=options["milp_seconds"])
    return found_plan, stats.bottleneck_ms


def _plan_tables(text: str, origin: str, options: dict[str, Any]) -> ShardingResult:
    from lakh.planner.embedding.cost_model import MemorySizes, cost_model
    from lakh.planner.embedding.sharding import plan_sharding
    from lakh.planner.embedding.tables import parse_tables
    from lakh.spec.cluster import load_cluster

    if not options["cluster"]:
        raise UserError("lakh dlrm plan", "needs a cluster", "add --cluster NAME, e.g. --cluster 8xh100")
    cluster = load_cluster(options["cluster"])
    ranks = options["ranks"] or cluster.gpus
    cluster.tier_of(ranks)
    if ranks > cluster.node_size and ranks % cluster.node_size:
        found = f"is not a whole number of nodes of {cluster.node_size} GPUs"
        raise InfeasiblePlan(f"--ranks {ranks}", found, f"choose a multiple of {cluster.node_size}")
    memory = MemorySizes(
        device=cluster.gpu.memory_bytes * options["memory_share"],
        host=options["host_gib"] * 2**30,
        file=options["file_gib"] * 2**30,
    )
    costs = cost_model(
        options["cost_model"], cluster, ranks, batch=options["batch"], min_width=options["min_width"], memory=memory
    )
    tables = parse_tables(text, origin)
    return plan_sharding(tables, costs, costs.limits, milp_time_s=options["milp_seconds"])


def _document(found: ShardingResult) -> dict[str, Any]:
    plan = found.plan
    device, host, file = (plan.rank_bytes(tier) for tier in ("device", "host", "file"))
    counts = [0] * plan.ranks
    for shard in plan.shards:
        counts[shard.rank] += 1
    return {
        "bottleneck_ms": found.bottleneck_ms,
        "lower_bound_ms": found.lower_bound_ms,
        "gap": found.gap,
        "ranks": [
            {
                "rank": rank,
                "ms": ms,
                "shards": counts[rank],
                "device_bytes": device[rank],
                "host_bytes": host[rank],
                "file_bytes": file[rank],
            }
            for rank, ms in enumerate(plan.rank_ms())
        ],
        "shards": [asdict(shard) for shard in plan.shards],
        "binds": asdict(found.binds),
        "seconds": found.seconds,
        "engine": found.engine,
        "node_size": plan.node_size,
        "cost_model": found.cost_model,
        "estimated": True,
    }


def _page(data: dict[str, Any]) -> Any:
    from collections import Counter

    from rich.console import Group

    ranks = data["ranks"]
    mean = sum(rank["ms"] for rank in ranks) / len(ranks)
    kinds = Counter(shard["kind"] for shard in data["shards"])
    rows: list[tuple[str, Any]] = [
        ("slowest rank", f"{data['bottleneck_ms']:,.4f} ms"),
        ("lower bound", f"{data['lower_bound_ms']:,.4f} ms  (gap {data['gap']:.3%})"),
        ("mean of the ranks", f"{mean:,.4f} ms"),
        ("binds", data["binds"]["reason"]),
        ("shards", ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())),
        ("found by", f"{data['engine']} in {data['seconds']:.2f} s"),
    ]
    if "published" in data:
        published = data["published"]
        rows.append(
            ("the imported plan", f"{published['bottleneck_ms']:,.1f} ms, {published['ratio']:.3f}x of this one")
        )
    if "file" in data:
        rows.append(("wrote", data["file"]))
    return Group(
        table([f"estimated under cost model {data['cost_model']}", "value"], rows),
        table(["rank", "ms", "GiB", "shards", ""], _bars(ranks, data["bottleneck_ms"])),
    )


def _bars(ranks: list[dict[str, Any]], slowest_ms: float) -> list[list[Any]]:
    """A row with a bar for each rank; for many ranks the slowest and the fastest ones."""
    shown = ranks
    if len(ranks) > SHOWN_RANKS:
        by_time = sorted(ranks, key=lambda rank: -rank["ms"])
        shown = by_time[: SHOWN_RANKS // 2] + by_time[-SHOWN_RANKS // 2 :]
    rows = []
    for rank in shown:
        size = sum(rank[f"{tier}_bytes"] for tier in ("device", "host", "file")) / 2**30
        bar = "█" * round(BAR_CHARS * rank["ms"] / slowest_ms) if slowest_ms else ""
        rows.append([rank["rank"], rank["ms"], round(size, 2), rank["shards"], bar])
    return rows
