"""lakh plan chakra and lakh plan infragraph: files of other simulators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.complete import complete_clusters
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, console, print_result, table
from lakh.cli.plan import FILE, add_options
from lakh.cli.plan_layout import PLAN_OPTIONS, REQUEST_OPTIONS

__all__ = ["chakra", "infragraph"]

FOLDER = click.Path(file_okay=False)
SLOW_NODES = 500_000
"""Nodes of traces from which a command takes more than half a minute."""
cluster_option = click.option(
    "--cluster",
    required=True,
    shell_complete=complete_clusters,
    help="Cluster file, or the name of one that ships with lakh.",
)


@click.group(cls=HintingGroup)
def chakra() -> None:
    """Write a step as Chakra execution traces; time traces on a cluster."""


@chakra.command("export")
@add_options(REQUEST_OPTIONS)
@add_options([click.option(name, type=kind, help=text) for name, (kind, text) in PLAN_OPTIONS.items()])
@click.option("--program", default="lakh", show_default=True, help="Program that trains, as in lakh plan estimate.")
@click.option("--out", required=True, type=FOLDER, help="Folder for step.RANK.et and the file of process groups.")
@print_result
def export_traces(program: str, out: str, **options: Any) -> CommandResult:
    """Write one planned step as Chakra execution traces, one file per rank."""
    import json

    from lakh import storage
    from lakh.cli.plan_model import planned_model
    from lakh.planner.estimate import check_plan
    from lakh.planner.interchange.chakra_export import step_traces
    from lakh.planner.interchange.chakra_replay import GROUPS_FILE
    from lakh.planner.interchange.chakra_trace import encode_trace
    from lakh.planner.request import PlanRequest

    request = PlanRequest.of(options, planned_model)
    plan = request.execution_plan(program, **options)
    check_plan(request.model, plan, request.cluster)
    traces = step_traces(request.model, plan, request.cluster, program=program)
    storage.make_dir(out)
    count = size_bytes = 0
    screen = console()
    if traces.ranks * len(traces.schedule.operations[0]) > SLOW_NODES:
        screen.print(
            f"{traces.ranks:,} traces of {len(traces.schedule.operations[0]):,} operations: this takes minutes"
        )
    with screen.status("traces") as status:
        for rank in range(traces.ranks):
            status.update(f"rank {rank} of {traces.ranks:,}")
            nodes = traces.nodes(rank)
            data = encode_trace(nodes)
            storage.write_bytes(Path(out) / f"step.{rank}.et", data)
            count, size_bytes = count + len(nodes), size_bytes + len(data)
    storage.write_bytes(Path(out) / GROUPS_FILE, json.dumps(traces.groups).encode())
    found = {"folder": out, "ranks": traces.ranks, "nodes": count, "bytes": size_bytes, "groups": len(traces.groups),
             "layout": plan.summary()}  # fmt: skip
    rows = [
        ("traces", f"{traces.ranks:,} files step.RANK.et in {out}"),
        ("nodes", f"{count:,}"),
        ("size", f"{size_bytes / 2**20:.1f} MiB"),
        ("process groups", f"{len(traces.groups)} in {GROUPS_FILE}"),
    ]
    return CommandResult(found, table(["written", "value"], rows))


@chakra.command("import")
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@cluster_option
@print_result
def import_traces(folder: str, cluster: str) -> CommandResult:
    """Time the Chakra execution traces of a folder (NAME.RANK.et) on a cluster.

    Process groups come from comm_groups.json in the folder: name -> list of ranks. A collective without one is of all
    ranks.
    """
    from dataclasses import asdict

    from lakh.planner.interchange.chakra_replay import read_traces, replay_traces
    from lakh.spec.cluster import load_cluster

    place = load_cluster(cluster)
    with console().status("reading traces") as status:
        traces = read_traces(folder)
        count = sum(map(len, traces.ranks))
        if count > SLOW_NODES:
            console().print(f"{count:,} nodes: this takes minutes")
        status.update("replaying traces")
        found = replay_traces(traces, place)
    data = {**asdict(found), "exposed_s": found.exposed_s, "ranks": len(traces.ranks), "cluster": place.name}
    rows = [
        ("ranks", f"{len(traces.ranks):,}"),
        ("time", f"{found.seconds:.4g} s; rank {found.slowest_rank} ends last"),
        ("computation", f"{found.compute_s:.4g} s, mean of the ranks"),
        ("on the host", f"{found.host_s:.4g} s, mean of the ranks"),
        ("communication", f"{found.communication_s:.4g} s, mean of the ranks; waits and overlap not counted"),
        ("not computing", f"{found.exposed_s:.4g} s, mean of the ranks"),
        *(
            [("note", f"{found.absent_dependencies:,} dependencies on nodes that were not recorded")]
            if found.absent_dependencies
            else []
        ),
        *((f"nodes: {kind}", f"{number:,}") for kind, number in found.nodes.items()),
        *((f"bytes: {kind}", f"{number / 1e9:,.4g} GB") for kind, number in found.bytes_sent.items()),
    ]
    return CommandResult({**data, "simulated": True}, table(["simulated", "value"], rows))


@click.group(cls=HintingGroup)
def infragraph() -> None:
    """Convert the network of a cluster to InfraGraph, and back."""


@infragraph.command("export")
@cluster_option
@click.option("--out", required=True, type=FILE, help="File to write (JSON).")
@print_result
def export_graph(cluster: str, out: str) -> CommandResult:
    """Write the network of a cluster as an InfraGraph."""
    import json

    from lakh import storage
    from lakh.planner.interchange.infragraph import infragraph_of
    from lakh.spec.cluster import load_cluster

    graph = infragraph_of(load_cluster(cluster))
    storage.write_bytes(out, json.dumps(graph, indent=1).encode())
    counts = {one["name"]: one["count"] for one in graph["instances"]}
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    data = {"file": out, "instances": counts, "edges": len(graph["edges"])}
    return CommandResult(data, table(["device", "number"], rows, f"wrote {out}"))


@infragraph.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--gpu-of",
    required=True,
    shell_complete=complete_clusters,
    help="Cluster file with this GPU: an InfraGraph describes links only.",
)
@click.option("--out", required=True, type=FILE, help="Cluster file to write (TOML).")
@print_result
def import_graph(file: str, gpu_of: str, out: str) -> CommandResult:
    """Read an InfraGraph (JSON or YAML) and write it as a cluster file."""
    from dataclasses import asdict

    from lakh import config, storage
    from lakh.planner.interchange.infragraph import cluster_from_infragraph, read_infragraph
    from lakh.spec.cluster import load_cluster

    found = cluster_from_infragraph(read_infragraph(file), load_cluster(gpu_of).gpu, file)
    storage.write_bytes(out, config.to_toml(found).encode())
    rows = [
        (tier.name, f"{tier.size:,}", tier.bandwidth_GBps, tier.latency_us, f"1:{tier.oversubscription:g}")
        for tier in found.tiers
    ]
    head = ["tier", "GPUs", "GB/s per GPU", "latency us", "oversubscription"]
    data = {"file": out, "tiers": [asdict(tier) for tier in found.tiers]}
    return CommandResult(data, table(head, rows, f"wrote {out}"))
