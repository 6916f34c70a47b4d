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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lakh.errors import PeerLost, PeerTimeout, from_dict
from lakh.server.loadgen.generator import LoadConfig, Techniques, run_load
from lakh.server.loadgen.report import LoadReport

__all__ = ["AblationRow", "ablation_rows", "run_ablation", "serving"]

START_S = 300.0
STOP_S = 30.0


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
