"""lakh bench rolling-update: completions of typing users while the server takes new weights.

A model with random weights is served from a run's folder (`lakh serve RUN --follow`), typing users send requests
at a steady rate, and new checkpoints appear in the folder. They are written before the load starts and moved into place
during it: a trainer writes them on other machines, and writing one in the process that sends the requests takes longer
(0.16 s of CPU time) than reading it in the server (0.03 s). The result has the latencies of every half second, and
which of them lie within `update_s` after a checkpoint: while the engine reads the weights, swaps them, and fills its
empty prefix cache again. An update is good if no request fails and the p99 of these is above twice that of the others
for less than 2 s.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from bench.harness import BenchRow, out_option, result
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError
from lakh.spec.model import Model

if TYPE_CHECKING:
    from torch import Tensor

    from lakh.server.loadgen.report import LoadReport

__all__ = ["rolling_update", "rows_over_time", "slowest_stretch_s", "summary_of"]

POLL_S = 0.5
ROW_S = 0.5
SETTLE_S = 3.0  # before the first update: the server's first requests compile kernels
JOIN_S = 60.0


class ServedModel(NamedTuple):
    spec: Model
    prefix_chars: int
    """Of a request; a character is about a token of these models."""
    suffix_chars: int
    update_s: float
    """In which an update is over: the weights are read and swapped, and the prefix cache is filled again."""


MODELS = {
    "tiny": ServedModel(
        Model(layers=4, width=128, heads=4, kv_heads=2, ffn=384, vocab=2048, context=512), 240, 80, 3.0
    ),
    "1.2b": ServedModel(
        Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096), 1600, 450, 12.0
    ),
}


def save_checkpoint(run_dir: Path, step: int, spec: Model = MODELS["tiny"].spec) -> None:
    """Complete when its manifest exists, which is written last."""
    from bench.decode.speed import tokenizer_json
    from lakh import checkpoint, config
    from lakh.spec import Data, Run

    run = Run(name="bench", model=spec, data=Data(sequence=spec.context))
    checkpoint.save(
        str(run_dir / "checkpoints" / checkpoint.folder_name(step)),
        {f"model.{name}": tensor * (1 + step / 1024) for name, tensor in _weights(spec).items()},
        step=step,
        sequence_index=step,
        run_sha256=config.fingerprint(run),
        data_sha256="none",
        attachments={"run.toml": config.to_toml(run).encode(), "tokenizer.json": tokenizer_json(spec.vocab)},
    )


@functools.lru_cache(maxsize=1)
def _weights(spec: Model) -> dict[str, Tensor]:
    from lakh.workloads.code.model import CodeModel, init_weights

    model = CodeModel(spec)
    init_weights(model, 0)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@contextlib.contextmanager
def updating(run_dir: Path, times_s: Sequence[float], spec: Model = MODELS["tiny"].spec) -> Iterator[list[float]]:
    """Moves a checkpoint into the run's folder at each of these times from now on; yields the times, on
    time.monotonic's clock, at which one was there."""
    from lakh import checkpoint

    done: list[float] = []
    stop = threading.Event()
    written = run_dir / "written"
    steps = range(2, 2 + len(times_s))
    for step in steps:
        save_checkpoint(written, step, spec)
    began_s = time.monotonic()

    def publish() -> None:
        for step, at_s in zip(steps, times_s, strict=True):
            if stop.wait(max(began_s + at_s - time.monotonic(), 0.0)):
                return
            name = checkpoint.folder_name(step)
            (written / "checkpoints" / name).rename(run_dir / "checkpoints" / name)
            done.append(time.monotonic())

    thread = threading.Thread(target=publish, name="bench-checkpoints")
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(JOIN_S)


def rows_over_time(report: LoadReport, updates_s: Sequence[float], update_s: float) -> list[BenchRow]:
    """Completed requests by the time at which they were sent, in steps of ROW_S. `updates_s`: when a checkpoint was
    complete, on the report's clock; `update_s`: how long an update takes at most."""
    by_row: dict[int, list[float]] = {}
    for at_s, _, e2e_s in report.latencies:
        by_row.setdefault(int(at_s / ROW_S), []).append(e2e_s * 1e3)
    rows: list[BenchRow] = []
    for number, found in sorted(by_row.items()):
        second, ordered = number * ROW_S, sorted(found)
        row: BenchRow = {"second": second, "completed": len(found), "p50_ms": ordered[len(ordered) // 2]}
        row["p99_ms"] = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
        row["update"] = any(at_s - ROW_S < second < at_s + update_s for at_s in updates_s)
        rows.append(row)
    return rows


def slowest_stretch_s(rows: Sequence[BenchRow], limit_ms: float) -> float:
    """The longest time with a p99 above the limit, among the rows of updates."""
    longest = current = 0
    for row in rows:
        current = current + 1 if row["update"] and row["p99_ms"] > limit_ms else 0
        longest = max(longest, current)
    return longest * ROW_S


def summary_of(report: LoadReport, rows: Sequence[BenchRow], num_updates: int, swaps: int) -> BenchRow:
    quiet = sorted(row["p99_ms"] for row in rows if not row["update"])
    busy = [row["p99_ms"] for row in rows if row["update"]]
    if not quiet or not busy:
        raise UserError("--seconds", "has no second without an update, or none with one", "measure longer")
    usual = quiet[len(quiet) // 2]
    return {
        "updates": num_updates,
        "swaps": swaps,
        "sent": report.sent,
        "completed": report.ends["completed"],
        "failed": report.ends["failed"] + report.ends["timeouts"] + report.ends["rejected"],
        "p99_ms": usual,
        "update_p99_ms": max(busy),
        "seconds_above_double": slowest_stretch_s(rows, 2 * usual),
    }


@click.command("rolling-update")
@click.option("--model", "name", type=click.Choice([*MODELS]), default="tiny", show_default=True, help="Served.")
@click.option("--rate", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Requests per second.")
@click.option("--users", type=click.IntRange(1), default=20, show_default=True, help="Who type.")
@click.option("--seconds", type=click.FloatRange(8.0), default=40.0, show_default=True, help="Length of the load.")
@click.option("--updates", type=click.IntRange(1), default=3, show_default=True, help="Checkpoints that appear.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of the server.")
@out_option
@print_result
def rolling_update(
    name: str, rate: float, users: int, seconds: float, updates: int, threads: int, out: str | None
) -> CommandResult:
    """Measure completions while the server takes new weights."""
    # Every request counts: none is cancelled by the next one of its user, and none is answered without the engine.
    from bench.serve.ablation import serving
    from lakh.server.loadgen.generator import LoadConfig, Techniques, run_load

    model, techniques = MODELS[name], Techniques(supersede=False, reuse=False)
    load = LoadConfig(
        rate,
        seconds,
        users=users,
        max_tokens=16,
        timeout_s=30.0,
        prefix_chars=model.prefix_chars,
        suffix_chars=model.suffix_chars,
        techniques=techniques,
    )
    gap_s = (seconds - SETTLE_S) / (updates + 1)
    files = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="lakh-update-") as folder, console().status("starting") as status:
        run_dir = Path(folder) / "run"
        save_checkpoint(run_dir, 1, model.spec)
        options = ["--follow", str(POLL_S), "--threads", str(threads)]
        with serving(str(run_dir), options) as url:
            times_s = [SETTLE_S + gap_s * (number + 1) for number in range(updates)]
            with updating(run_dir, times_s, model.spec) as done:
                began_s = time.monotonic()
                report = run_load(url, files, load, progress=lambda sent: status.update(f"{sent} requests sent"))
    swaps = int(report.increase("weights_version"))
    rows = rows_over_time(report, [at_s - began_s for at_s in done], model.update_s)
    return result("rolling-update", [summary_of(report, rows, len(done), swaps)], out, seconds=rows)
