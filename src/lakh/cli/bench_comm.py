"""lakh bench comm: collectives over c3 beside Gloo and MPI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.output import CommandResult, console, print_result, table

__all__ = ["comm"]


@click.command("comm")
@click.option("--backends", default="c3,gloo", show_default=True, help="Of c3, gloo, mpi.")
@click.option("--ops", default="all_reduce", show_default=True, help="Of all_reduce, all_gather, reduce_scatter, ...")
@click.option("--sizes", default="1KB,1MB,8MB", show_default=True, help="Buffer sizes; KB is 1024 bytes.")
@click.option("--dtypes", default="f32", show_default=True, help="Of f32, f64, f16, bf16, i32, i64.")
@click.option("--ranks", type=int, help="Processes on this machine: 2, or those of the --emulate file.")
@click.option("--percent", default="100", show_default=True, help="Also with a part of the ranks: 10,50,100.")
@click.option("--registered", is_flag=True, help="Buffers in registered memory, which ranks of a host share.")
@click.option("--emulate", type=click.Path(dir_okay=False), help="Topology file: play its hosts, racks and links.")
@click.option("--untold", is_flag=True, help="With --emulate: c3 must find out what the links carry.")
@click.option("--codec", default="none", show_default=True, help="Of none, bf16, int8, int4: between outer groups.")
@click.option("--algorithm", default="", help="Overrule c3's choice: flat, halving_doubling, ring, hierarchical.")
@click.option("--repeats", type=click.IntRange(min=5), help="Timed calls of each: 200 up to 64KB, else 25, or 10 s.")
@click.option("--find-slow", is_flag=True, help="Also measure every pair of ranks and name the slow one.")
@click.option("--metrics-port", type=int, metavar="PORT", help="Counters for Prometheus, of rank R at PORT + R.")
@click.option("--fsdp", is_flag=True, help="Instead: a whole FSDP2 training step of a 10M-parameter model.")
@click.option("--chaos", type=click.IntRange(min=1), help="Instead: hurt ranks so many times and check every sum.")
@click.option("--seed", default=0, show_default=True, help="Of --chaos.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw time over size into this file (needs matplotlib).")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
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
    """Collectives over c3 beside Gloo and MPI, in the same run."""
    if chaos:
        return _drill(chaos, seed)
    if fsdp:
        return _training_step(2 if ranks is None else ranks, options["repeats"] or 25, options["registered"], out)
    from lakh.c3.bench import Sweep, parse_size, run_bench

    for name in ("backends", "ops", "dtypes"):
        options[name] = tuple(word.strip() for word in options[name].split(",") if word.strip())
    options["emulate"] = options["emulate"] or ""
    ranks = _ranks(ranks, options["emulate"])
    counts = _counts(ranks, percent)
    if plot:
        _can_draw(plot)
    data: dict[str, Any] = {"machine": machine(), "rows": []}
    for count in counts:
        sweep = Sweep(sizes=tuple(parse_size(word.strip()) for word in sizes.split(",")), ranks=count, **options)
        found = run_bench(sweep, say=console().print)
        data["rows"] += found.pop("rows")
        data |= found
    if plot:
        data["plot"] = _draw(plot, data["rows"])
    if out:
        words = {name: ",".join(options[name]) for name in ("backends", "ops", "dtypes")}
        words |= {"sizes": sizes, "ranks": str(ranks), "codec": options["codec"]}
        words |= {"repeats": str(options["repeats"])} if options["repeats"] else {}
        words |= {"emulate": options["emulate"]} if options["emulate"] else {}
        command = "lakh bench comm " + " ".join(f"--{name} {value}" for name, value in words.items())
        command += "".join(f" --{name}" for name in ("registered", "untold") if options[name])
        data["file"] = keep(Path(out), "comm", command, data)
    columns = ["what", "size", "min us", "median", "p99", "algbw", "busbw", "bound", "x gloo"]
    shown = table(columns, [_cells(row) for row in data["rows"]])
    if "slow" in data:
        console().print(data["slow"]["reason"])
    for note in data.get("notes", []):
        console().print(note)
    for size, reason in data.get("reasons", {}).items() if options["emulate"] else ():
        console().print(f"c3, {size} bytes: {reason}")
    return CommandResult(data, shown)


def _cells(row: dict[str, Any]) -> list[str]:
    """One row as text; GB/s as nccl-tests count them, percent of the bound, times as fast as Gloo."""
    size = row["size_bytes"]
    unit, factor = next((u, f) for u, f in (("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)) if size >= f or f == 1)
    times = [f"{row[name]:.0f}" for name in ("min_us", "median_us", "p99_us")]
    rates = [f"{row[name]:.2g}" for name in ("algbw_GBps", "busbw_GBps")]
    bound = "" if row["bound_fraction"] is None else f"{row['bound_fraction']:.0%}"
    ratio = "" if row["ratio_to_gloo"] is None else f"{row['ratio_to_gloo']:.1f}"
    what = f"{row['backend']} {row['op']} {row['dtype']} x{row['ranks']}"
    return [what, f"{size / factor:g}{unit}", *times, *rates, bound, ratio]


def _drill(faults: int, seed: int) -> CommandResult:
    from dataclasses import asdict

    from lakh.c3.chaos import drill
    from lakh.errors import LakhError

    report = drill(faults, seed, say=console().print)
    data = {"machine": machine(), **asdict(report), "faults": dict(report.faults), "total": report.total}
    if report.problems:
        found = f"{len(report.problems)} problems, the first: {report.problems[0]}"
        raise LakhError("c3 drill", found, "run the same seed again and look at it")
    rows = [(name, value) for name, value in data.items() if name not in ("machine", "problems")]
    return CommandResult(data, table(["what", "value"], rows, title="no hang, no wrong sum, nothing left behind"))


def _training_step(ranks: int, steps: int, registered: bool, out: str | None) -> CommandResult:
    from lakh.c3.bench_fsdp import bench_fsdp

    _counts(ranks, "100")
    found = bench_fsdp(ranks=ranks, steps=steps, registered=registered, say=console().print)
    data: dict[str, Any] = {"machine": machine(), **found}
    if out:
        command = f"lakh bench comm --fsdp --ranks {ranks} --repeats {steps}" + " --registered" * registered
        data["file"] = keep(Path(out), "comm-fsdp", command, data)
    rows = [
        [row["backend"], *(f"{row[name]:.1f}" for name in ("min_ms", "median_ms", "tokens_per_s", "ratio_to_gloo"))]
        for row in data["rows"]
    ]
    title = f"FSDP2 step, {data['rows'][0]['parameters']:,} parameters, {ranks} ranks"
    return CommandResult(data, table(["backend", "min ms", "median ms", "tokens/s", "x gloo"], rows, title=title))


def _ranks(asked: int | None, emulate: str) -> int:
    from lakh.c3.topology import read_topology
    from lakh.errors import UserError

    described = read_topology(emulate).size if emulate else None
    if asked is not None and described is not None and asked != described:
        raise UserError(f"--ranks {asked}", f"{emulate} describes {described}", "leave it out, or give --percent")
    return (described or 2) if asked is None else asked


def _counts(ranks: int, percent: str) -> list[int]:
    from lakh.errors import UserError

    if ranks < 2:
        raise UserError(f"--ranks {ranks}", "a collective needs two", "give 2 or more")
    try:
        parts = [float(word) for word in percent.split(",")]
    except ValueError:
        raise UserError(f"--percent {percent}", "is not a list of numbers", "write 10,50,100") from None
    if not all(0 < part <= 100 for part in parts):
        raise UserError(f"--percent {percent}", "is no part of the ranks", "give numbers above 0 and up to 100")
    return sorted({max(2, round(ranks * part / 100)) for part in parts})


def _can_draw(path: str) -> None:
    """Refused before anything is measured."""
    from lakh.errors import MissingExtra, UserError

    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtra("--plot", "matplotlib", "bench") from None
    mpl.use("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:
        raise UserError(f"--plot {path}", "is no kind of picture", f"end it in one of {', '.join(sorted(kinds))}")
    if not os.access(Path(path).parent, os.W_OK):
        raise UserError(f"--plot {path}", "its folder is not there or cannot be written to", "name another one")


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
