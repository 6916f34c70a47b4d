"""lakh bench comm: collectives of c3 beside Gloo and MPI."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.harness import Peer, detect_peers, log, machine, out_option, print_rows, result
from lakh.cli.output import CommandResult, print_result, table
from lakh.errors import LakhError, MissingExtra, UserError

__all__ = ["comm"]

PEERS = (Peer("mpi", ("mpi4py",), ("mpiexec",)), Peer("gloo", ("torch",)), Peer("c3", ("torch",)))
COLUMNS = ["what", "size", "min us", "median", "p99", "algbw", "busbw", "bound", "x gloo"]


@click.command("comm")
@click.option("--backends", default="c3,gloo", show_default=True, help="Comma-separated: c3, gloo, mpi.")
@click.option(
    "--ops",
    default="all_reduce",
    show_default=True,
    help="all_reduce, all_gather, reduce_scatter, all_to_all_v (uneven), ...",
)
@click.option("--sizes", default="1KB,1MB,8MB", show_default=True, help="Buffer sizes; 1KB is 1024 bytes.")
@click.option("--dtypes", default="f32", show_default=True, help="Comma-separated: f32, f64, f16, bf16, i32, i64.")
@click.option("--ranks", type=int, help="Processes on this machine; default: 2, or those of the --emulate file.")
@click.option("--percent", default="100", show_default=True, help="Also measure with a part of the ranks: 10,50,100.")
@click.option("--registered", is_flag=True, help="Use registered memory, which the ranks of a host share.")
@click.option("--emulate", type=click.Path(dir_okay=False), help="Topology file: emulate its hosts, racks and links.")
@click.option("--untold", "measure_links", is_flag=True, hidden=True)  # the former name
@click.option("--measure-links", is_flag=True, help="With --emulate: c3 measures the speed of the links itself.")
@click.option("--codec", default="none", show_default=True, help="Codec between outer groups: none, bf16, int8, int4.")
@click.option("--algorithm", default="", help="Override c3's choice: flat, halving_doubling, ring, hierarchical.")
@click.option("--repeats", type=click.IntRange(min=5), help="Timed calls; default: 200 up to 64KB, else 25 or 10 s.")
@click.option("--find-slow", is_flag=True, help="Also measure every pair of ranks and name the slow rank or link.")
@click.option("--metrics-port", type=int, metavar="PORT", help="Serve Prometheus metrics of rank R at PORT + R.")
@click.option("--fsdp", is_flag=True, help="Instead: measure an FSDP2 training step of a 10M-parameter model.")
@click.option("--chaos", type=click.IntRange(min=1), metavar="N", help="Instead: inject N faults and check every sum.")
@click.option("--seed", default=0, show_default=True, help="Random seed of --chaos.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Plot time over size into this file (needs matplotlib).")
@out_option
@print_result
def comm(
    sizes: str,
    ranks: int | None,
    percent: str,
    plot: str | None,
    out: str | None,
    fsdp: bool,
    chaos: int | None,
    seed: int,
    **options: Any,
) -> CommandResult:
    """Compare the collectives of c3 with Gloo and MPI."""
    if chaos:
        return _chaos(chaos, seed)
    if fsdp:
        return _fsdp(2 if ranks is None else ranks, options["repeats"] or 25, options["registered"], out)
    from bench.comm.collectives import CommSweep, bench_collectives, parse_size

    for name in ("backends", "ops", "dtypes"):
        options[name] = tuple(word.strip() for word in options[name].split(",") if word.strip())
    options["emulate"] = options["emulate"] or ""
    sizes_bytes = tuple(parse_size(word.strip()) for word in sizes.split(","))
    counts = _counts(_ranks(ranks, options["emulate"]), percent)
    for count in counts:
        CommSweep(sizes=sizes_bytes, ranks=count, **options)  # wrong options fail before anything runs
    options["backends"] = tuple(detect_peers(options["backends"], PEERS, log))
    if not options["backends"]:
        raise UserError("--backends", "none of them can run here", "choose others")
    if plot:
        _check_plot(plot)
    more: dict[str, Any] = {}
    rows = []
    for count in counts:
        found = bench_collectives(CommSweep(sizes=sizes_bytes, ranks=count, **options), log=log)
        rows += found.pop("rows")
        more |= found
    if plot:
        more["plot"] = _draw(plot, rows)
    for note in more.get("notes", []):
        log(note)
    if "slow" in more:
        log(more["slow"]["reason"])
    for size, reason in more.get("reasons", {}).items() if options["emulate"] else ():
        log(f"c3, {size} bytes: {reason}")
    data = result("comm", rows, out, **more).data
    return CommandResult(data, table(COLUMNS, [_cells(row) for row in rows]))


def _cells(row: dict[str, Any]) -> list[str]:
    """One row as text: GB/s as nccl-tests define them, percent of the bound, and the ratio to Gloo."""
    size = row["size_bytes"]
    unit, factor = next((u, f) for u, f in (("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)) if size >= f or f == 1)
    times = [f"{row[name]:.0f}" for name in ("min_us", "median_us", "p99_us")]
    rates = [f"{row[name]:.2g}" for name in ("algbw_GBps", "busbw_GBps")]
    bound = "" if row["bound_fraction"] is None else f"{row['bound_fraction']:.0%}"
    ratio = "" if row["ratio_to_gloo"] is None else f"{row['ratio_to_gloo']:.1f}"
    what = f"{row['backend']} {row['op']} {row['dtype']} x{row['ranks']}"
    return [what, f"{size / factor:g}{unit}", *times, *rates, bound, ratio]


def _chaos(faults: int, seed: int) -> CommandResult:
    from bench.comm.chaos import run_chaos

    report = run_chaos(faults, seed, log=log)
    data = {"machine": machine(), **asdict(report), "faults": dict(report.faults), "total": report.total}
    if report.problems:
        found = f"{len(report.problems)} problems, the first: {report.problems[0]}"
        raise LakhError("lakh bench comm --chaos", found, f"repeat it with --seed {seed}")
    rows = [(name, value) for name, value in data.items() if name not in ("machine", "problems")]
    return CommandResult(data, table(["what", "value"], rows, title="no hang, no wrong sum, nothing left behind"))


def _fsdp(ranks: int, steps: int, registered: bool, out: str | None) -> CommandResult:
    from bench.comm.fsdp import bench_fsdp

    _counts(ranks, "100")
    rows = bench_fsdp(ranks=ranks, steps=steps, registered=registered, log=log)
    heads = {"backend": "backend", "min_ms": "min ms", "median_ms": "median ms", "tokens_per_s": "tokens/s"}
    data = result("comm-fsdp", rows, out).data
    shown = [{name: f"{v:.1f}" if isinstance(v, float) else v for name, v in row.items()} for row in rows]
    title = f"FSDP2 step, {rows[0]['parameters']:,} parameters, {ranks} ranks"
    return CommandResult(data, print_rows(shown, heads | {"ratio_to_gloo": "x gloo"}, title))


def _ranks(asked: int | None, emulate: str) -> int:
    from lakh.c3.topology import read_topology

    described = read_topology(emulate).size if emulate else None
    if asked is not None and described is not None and asked != described:
        raise UserError(f"--ranks {asked}", f"{emulate} describes {described}", "remove it, or use --percent")
    return (described or 2) if asked is None else asked


def _counts(ranks: int, percent: str) -> list[int]:
    if ranks < 2:
        raise UserError(f"--ranks {ranks}", "a collective needs at least 2 ranks", "give 2 or more")
    try:
        parts = [float(word) for word in percent.split(",")]
    except ValueError:
        raise UserError(f"--percent {percent}", "is not a list of numbers", "write 10,50,100") from None
    if not all(0 < part <= 100 for part in parts):
        raise UserError(f"--percent {percent}", "is out of range", "give numbers above 0 and up to 100")
    return sorted({max(2, round(ranks * part / 100)) for part in parts})


def _check_plot(path: str) -> None:
    """Refuse a plot that cannot be written before anything is measured."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtra("--plot", "matplotlib", "bench") from None
    mpl.use("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:
        raise UserError(f"--plot {path}", "is not a known image format", f"use one of {', '.join(sorted(kinds))}")
    if not os.access(Path(path).parent, os.W_OK):
        raise UserError(f"--plot {path}", "its folder does not exist or is not writable", "choose another one")


def _draw(path: str, rows: list[dict[str, Any]]) -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for key in sorted({(row["op"], row["dtype"], row["ranks"], row["backend"]) for row in rows}):
        mine = [row for row in rows if (row["op"], row["dtype"], row["ranks"], row["backend"]) == key]
        label = f"{key[3]} {key[0]} {key[1]} x{key[2]}"
        axes.plot([row["size_bytes"] for row in mine], [row["median_us"] for row in mine], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="median, microseconds")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return path
