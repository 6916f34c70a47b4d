"""lakh health: check this node's hardware counters, once or every 30 s, and decide whether it may go on."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, console, print_result, set_option, table
from lakh.errors import UserError
from lakh.health import CHECKS, HealthDecision, HealthFinding, HealthLedger, HealthReading, decide_health
from lakh.health.decisions import evaluate_checks, inject
from lakh.health.report import HealthReport
from lakh.health.sources import read_node

__all__ = ["health"]

DRAIN_EXIT_CODE = 75
folder_option = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    help="Folder in which runs write.  [default: .]",
)
gpus_option = click.option("--gpus", type=click.IntRange(min=0), help="GPUs that this node has when it is healthy.")
ledger_option = click.option("--ledger", type=click.Path(dir_okay=False), help="File of findings per serial number.")
fault_option = click.option("--inject", "faults", multiple=True, metavar="CHECK", help="Inject the fault of a check.")


@click.group(cls=HintingGroup)
def health() -> None:
    """Check this node's hardware, and decide whether it may go on."""


@health.command()
@folder_option
@gpus_option
@ledger_option
@fault_option
@click.option(
    "--products",
    "products_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Also multiply matrices on every device for so long, and check the products.",
)
@print_result
def check(
    folder: str, gpus: int | None, ledger: str | None, faults: tuple[str, ...], products_s: float | None
) -> CommandResult:
    """Check this node once.

    The decision is healthy, watch, drain or rma, with its reason. Exits with 75 on drain and rma. --products takes the
    devices for itself: use it between jobs.
    """
    node = socket.gethostname()
    found = read_node(folder, expected_gpus=gpus)
    if products_s is not None:
        from lakh.trainer.product_check import read_products

        found = [*found, *read_products(node, products_s)]
    readings, before = _inject(faults, found, found, node)
    findings, decision = _check(readings, before, ledger, node)
    rows = [(f.check, f.device, f.value, "ok" if f.ok else f.level, f.reason) for f in findings]
    text = table(["check", "device", "value", "", "reason"], rows, title=f"{decision.word}: {decision.reason}")
    data = {"checks": [dataclasses.asdict(f) for f in findings], "decision": decision.word, "reason": decision.reason}
    return CommandResult(data, text, exit_code=_exit_code(decision))


@health.command()
@folder_option
@gpus_option
@ledger_option
@fault_option
@click.option("--every", "every_s", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="Seconds.")
@click.option(
    "--drain-pid", type=click.IntRange(min=2), help="Process to send SIGTERM on drain: the launcher of a run."
)
@click.option("--rounds", type=click.IntRange(min=1), help="Stop after this many checks.")
@click.option("--events", type=click.Path(file_okay=False), help="Folder for events about changed decisions.")
@click.option("--prometheus-port", type=click.IntRange(0, 65535), help="Port of a page with metrics; 0: any free one.")
@print_result
def agent(
    folder: str,
    gpus: int | None,
    ledger: str | None,
    faults: tuple[str, ...],
    every_s: float,
    drain_pid: int | None,
    rounds: int | None,
    events: str | None,
    prometheus_port: int | None,
) -> CommandResult:
    """Check this node every 30 s until it must be drained.

    On drain it sends SIGTERM to --drain-pid, which saves a checkpoint and exits with 75, and exits with 75. Faults
    are injected from the second check on.
    """
    node, console_ = socket.gethostname(), console()
    before: list[HealthReading] = []
    decision, number = HealthDecision("healthy", "no check yet"), 0
    with HealthReport(node, events=events, port=prometheus_port) as report:
        if report.port is not None:
            console_.print(f"metrics: http://{node}:{report.port}/metrics", markup=False)
        while rounds is None or number < rounds:
            if number:
                time.sleep(every_s)
            found = read_node(folder, expected_gpus=gpus)
            readings, earlier = _inject(faults if number else (), found, before or found, node)
            findings, decision = _check(readings, earlier, ledger, node)
            report.update(findings, decision)
            number += 1
            before = found
            if decision.word != "healthy":
                console_.print(f"{node}: {decision.word}: {decision.reason}", markup=False)
            if _exit_code(decision):
                if drain_pid is not None:
                    _send_sigterm(drain_pid)
                break
    data = {"rounds": number, "decision": decision.word, "reason": decision.reason}
    return CommandResult(data, f"{decision.word}: {decision.reason}", exit_code=_exit_code(decision))


@health.command()
@click.option("--nproc", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks on this machine.")
@click.option("--megabytes", type=click.FloatRange(min=0.001), default=64.0, show_default=True, help="Of each message.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl", "c3"]),
    default="auto",
    show_default=True,
    help="Library that sends the bytes.",
)
@print_result
def pairs(nproc: int, megabytes: float, backend: str) -> CommandResult:
    """Test the links between ranks, pair by pair.

    Every rank all-reduces with every other one; the sums are checked and the bandwidth is measured. Starts ranks on
    this machine, or is one rank under torchrun and Slurm. Exits with 75 if a rank is slow or its sums are wrong.
    """
    from lakh.health.pairs import find_faulty_ranks
    from lakh.trainer.launch.rank import is_rank

    if not is_rank():
        from lakh.trainer.launch.plain_ranks import run_plain_ranks

        words = ["health", "pairs", "--megabytes", str(megabytes), "--backend", backend]
        return _pairs_result(run_plain_ranks(words, nproc))
    from lakh.spec import Training
    from lakh.trainer.launch.world import World
    from lakh.trainer.pair_check import check_pairs

    with World.join(Training(backend=backend)) as world:  # type: ignore[arg-type]
        results = check_pairs(world, megabytes)
    faulty = find_faulty_ranks(results)
    rows = [dataclasses.asdict(result) for result in results]
    return _pairs_result({"pairs": rows, "faulty": {str(rank): reason for rank, reason in faulty.items()}})


def _pairs_result(data: dict[str, Any]) -> CommandResult:
    rows = [(r["first"], r["second"], f"{r['GBps']:.2f}", "ok" if r["is_right"] else "WRONG") for r in data["pairs"]]
    title = "; ".join(f"rank {rank}: {reason}" for rank, reason in data["faulty"].items()) or "every pair is fine"
    exit_code = DRAIN_EXIT_CODE if data["faulty"] else 0
    return CommandResult(data, table(["rank", "rank", "GB/s", "sums"], rows, title=title), exit_code=exit_code)


@health.command()
@click.argument("run")
@set_option
@click.option(
    "--fault",
    required=True,
    metavar="NAME",
    help="kill, stop, kill-ranks, kill-all, link-cut, disk-full, corrupt-chunk, s3-503, s3-slow, s3-reset, or the name "
    "of a health check that drains.",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks to start on this machine."
)
@click.option("--at-step", type=click.IntRange(min=1), default=5, show_default=True, help="Step of the fault.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Times to inject it.")
@click.option("--out", type=click.Path(file_okay=False), help="Keep both runs in this folder.")
@print_result
def drill(
    run: str, sets: tuple[str, ...], fault: str, nproc: int, at_step: int, repeat: int, out: str | None
) -> CommandResult:
    """Train a run with a fault, and measure detection and recovery.

    RUN is trained twice, undisturbed and with the fault; both must read the same sequences. For a test cluster, not for
    a node with real work.
    """
    from lakh.health.drill import run_drill

    with contextlib.ExitStack() as stack:
        folder = out or stack.enter_context(tempfile.TemporaryDirectory(prefix="lakh-drill-"))
        found = run_drill(run, fault, Path(folder), sets=sets, nproc=nproc, at_step=at_step, repeat=repeat)
    data = dataclasses.asdict(found)
    return CommandResult(data, table(["what", "value"], list(data.items())))


def _check(
    readings: list[HealthReading], before: list[HealthReading], ledger: str | None, node: str
) -> tuple[list[HealthFinding], HealthDecision]:
    findings = evaluate_checks(readings, before)
    book = HealthLedger(ledger) if ledger else None
    decision = decide_health(findings, book.drains() if book else None)
    if book:
        book.append(findings, time_s=time.time(), node=node)
    return findings, decision


def _inject(
    names: tuple[str, ...], readings: list[HealthReading], before: list[HealthReading], node: str
) -> tuple[list[HealthReading], list[HealthReading]]:
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            todo = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(known)}"
            raise UserError(f"--inject {name}", "no such check", todo)
        readings, before = inject(known[name], readings, before, node)
    return readings, before


def _send_sigterm(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        raise UserError(f"--drain-pid {pid}", "no such process", "give the process of lakh train") from None
    except PermissionError:
        raise UserError(f"--drain-pid {pid}", "belongs to another user", "run the agent as its user") from None


def _exit_code(decision: HealthDecision) -> int:
    return DRAIN_EXIT_CODE if decision.word in ("drain", "rma") else 0
