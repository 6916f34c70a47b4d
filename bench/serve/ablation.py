"""An ablation of the server's techniques: the same load, with one more technique in each row.

Every row starts a fresh `lakh serve` on this machine and sends it the same load (same seed, same arrivals). What is
sent decides which technique can work (generator.py); speculation is a server option. Rows accumulate: the last one has
all techniques. A row that is slower than the one before stays in the table.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from lakh.cli.output import CommandResult, console, table
from lakh.errors import Interrupted, PeerLost, PeerTimeout, from_dict
from lakh.server.loadgen.generator import LoadConfig, Techniques, run_load
from lakh.server.loadgen.report import LoadReport, save

__all__ = ["AblationRow", "ablation_rows", "before_after", "run_ablation"]

START_S = 300.0
STOP_S = 30.0
# Columns of the ablation table: title, value of a row, format.
COLUMNS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("technique", itemgetter("row"), ""),
    ("first ms", lambda row: row["ttft_ms"]["p50"], ".0f"),
    ("p50 ms", lambda row: row["e2e_ms"]["p50"], ".0f"),
    ("p99 ms", lambda row: row["e2e_ms"]["p99"], ".0f"),
    ("late", lambda row: (row["timeouts"] + row["rejected"] + row["failed"]) / max(row["sent"], 1), ".1%"),
    ("done", itemgetter("completed"), ""),
    ("prefilled", itemgetter("prefilled_tokens_per_request"), ".0f"),
    ("CPU ms", itemgetter("server_cpu_ms_per_request"), ".0f"),
    ("prefix hits", itemgetter("prefix_hit_rate"), ".0%"),
    ("text hits", itemgetter("text_hit_rate"), ".0%"),
    ("drafts accepted", itemgetter("draft_acceptance"), ".0%"),
    ("$ per 1k", itemgetter("cost_per_1k"), ".3f"),
]


@dataclass(frozen=True)
class AblationRow:
    name: str
    order: str
    techniques: Techniques
    options: tuple[str, ...]
    """Options of lakh serve."""


def ablation_rows(order: str, draft: str | None) -> list[AblationRow]:
    """With `order` none (a model without fill in the middle) there is no row for the prompt's order."""
    before = "none" if order == "none" else "psm"
    off = ("--no-speculate",)
    nothing = Techniques(prefix_cache=False, supersede=False, reuse=False)
    cached = replace(nothing, prefix_cache=True)
    rows = [
        AblationRow("nothing", before, nothing, off),
        AblationRow("+ prefix cache", before, cached, off),
        *([] if order == "none" else [AblationRow("+ suffix first (spm)", "spm", cached, off)]),
        AblationRow("+ superseding", order, replace(cached, supersede=True), off),
        AblationRow("+ text reuse", order, Techniques(), off),
        AblationRow("+ n-gram speculation", order, Techniques(), ()),
    ]
    if draft is not None:
        rows.append(AblationRow("+ draft model", order, Techniques(), ("--draft", draft)))
    return rows


def run_ablation(
    model: str,
    rows: Sequence[AblationRow],
    files: Path,
    load: LoadConfig,
    *,
    options: Sequence[str] = (),
    progress: Callable[[str, int], None] = lambda row, sent: None,
) -> Generator[tuple[AblationRow, LoadReport], None, None]:
    """Closing the generator ends the current row's server."""
    for row in rows:
        mine = replace(load, order=row.order, techniques=row.techniques)
        with serving(model, [*options, *row.options]) as url:
            yield row, run_load(url, files, mine, progress=lambda sent, row=row: progress(row.name, sent))  # type: ignore[misc]


@contextlib.contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[str]:
    """Run `lakh serve MODEL` as a process; yields its URL."""
    command = [sys.executable, "-m", "lakh", "serve", model, "--http", "127.0.0.1:0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            ready: dict[str, Any] = json.loads(_ready_line(process))
            yield str(ready["url"])
            process.terminate()
            process.communicate(timeout=STOP_S)
        finally:
            if process.poll() is None:
                process.kill()


def _ready_line(process: subprocess.Popen[str]) -> str:
    """The JSON line of a server that is ready; raises the server's own error if there is none."""
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        fired = not watchdog.is_alive()
        watchdog.cancel()
    if fired:
        raise PeerTimeout("lakh serve", f"was not ready within {START_S:g} s", "try a smaller model")
    answer = json.loads(line) if line.startswith("{") else {}
    if "error" in answer:
        raise from_dict(answer["error"])
    if not answer:
        _, printed = process.communicate(timeout=STOP_S)
        raise PeerLost("lakh serve", f"did not start: {printed.strip()[-300:]}", "try the same command by itself")
    return line


def before_after(
    model: str,
    files: Path,
    load: LoadConfig,
    draft: str | None,
    threads: int | None,
    price: tuple[float | None, str],
    image: Path | None,
) -> CommandResult:
    """What `lakh loadgen MODEL --before-after` runs. `price`: US dollars per hour, and the source of that price."""
    price_per_hour, source = price
    rows, is_interrupted = _measure(model, files, load, draft, threads, price_per_hour)
    title = f"{model}: {load.rate:g} requests/s for {load.seconds:g} s; price {source}"
    if image is not None:
        _plot(rows, image, title)
    lines = [[_formatted(read(row), form) for _, read, form in COLUMNS] for row in rows]
    data = {"rows": rows, "price": source, **({"interrupted": True} if is_interrupted else {})}
    shown = table([name for name, _, _ in COLUMNS], lines, title=title)
    return CommandResult(data, shown, exit_code=Interrupted.exit_code if is_interrupted else 0)


def _measure(
    model: str, files: Path, load: LoadConfig, draft: str | None, threads: int | None, price: float | None
) -> tuple[list[dict[str, Any]], bool]:
    """The measured rows, and whether Ctrl-C ended the measurement."""
    rows: list[dict[str, Any]] = []
    options = [] if threads is None else ["--threads", str(threads)]
    with console().status("starting the server") as status:
        measured = run_ablation(
            model,
            ablation_rows(load.order, draft),
            files,
            load,
            options=options,
            progress=lambda name, sent: status.update(f"{name}: {sent} requests sent"),
        )
        try:
            for row, report in measured:
                rows.append({"row": row.name, **report.as_dict(price)})
                p50, p99 = (_formatted(rows[-1]["e2e_ms"][mark], ".0f") for mark in ("p50", "p99"))
                status.console.print(f"{row.name}: p50 {p50} ms, p99 {p99} ms", highlight=False)
                if report.is_interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # in a load, or while a server starts
            if not rows:
                raise
            status.console.print("interrupted: showing what was measured; the rest did not run")
            return rows, True
        finally:
            measured.close()  # stops the server
    return rows, False


def _formatted(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """An ablation: latencies and CPU time per request, with one more technique in each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    latency, work = figure.subplots(2, 1)
    figure.suptitle(title, fontsize="small")
    names = [row["row"] for row in rows]
    figures = [("first token, p50", "ttft_ms", "p50"), ("last token, p50", "e2e_ms", "p50"), ("p99", "e2e_ms", "p99")]
    for number, (label, what, mark) in enumerate(figures):
        places = [at + (number - 1) * 0.27 for at in range(len(rows))]
        latency.bar(places, [row[what][mark] or 0.0 for row in rows], width=0.25, label=label)
    work.bar(range(len(rows)), [row["server_cpu_ms_per_request"] or 0.0 for row in rows], color="tab:gray")
    latency.set(ylabel="ms, as seen by clients")
    work.set(ylabel="server CPU ms per request")
    for axis in (latency, work):
        axis.set_xticks(range(len(rows)), names, rotation=20, ha="right", fontsize="small")
        axis.grid(alpha=0.3, axis="y")
    latency.legend()
    save(figure, path)
