"""The table of before and after: one technique more in every row, the same typists, a fresh server each time.

Every row starts `lakh serve` anew on the same machine, so that nothing is left over from the row before, and sends it
the same load (same seed, same arrivals). Which technique works is decided by what is sent (generator.py) and, for
speculation, by the server's options. Rows add up: the last has all of them. What a technique does depends on model,
machine and load; a row that is slower than the one before stays in the table.
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

__all__ = ["Sequence", "rows_of", "run_rows", "serving"]

START_S = 300.0
STOP_S = 30.0


@dataclass(frozen=True)
class Sequence:
    name: str
    order: str
    techniques: Techniques
    options: tuple[str, ...]
    """Of lakh serve."""


def rows_of(order: str, draft: str | None) -> list[Sequence]:
    """`order` none: a model that cannot fill in, so there is no row for the order of the prompt."""
    before = "none" if order == "none" else "psm"
    off = ("--no-speculate",)
    nothing = Techniques(prefix_cache=False, supersede=False, reuse=False)
    cached = replace(nothing, prefix_cache=True)
    rows = [
        Sequence("nothing", before, nothing, off),
        Sequence("+ prefix cache", before, cached, off),
        *([] if order == "none" else [Sequence("+ suffix first (spm)", "spm", cached, off)]),
        Sequence("+ superseding", order, replace(cached, supersede=True), off),
        Sequence("+ text reuse", order, Techniques(), off),
        Sequence("+ n-gram speculation", order, Techniques(), ()),
    ]
    if draft is not None:
        rows.append(Sequence("+ draft model", order, Techniques(), ("--draft", draft)))
    return rows


def run_rows(
    model: str,
    rows: Sequence[Sequence],
    files: Path,
    load: LoadConfig,
    *,
    options: Sequence[str] = (),
    progress: Callable[[str, int], None] = lambda row, sent: None,
) -> Generator[tuple[Sequence, LoadReport], None, None]:
    """Closing it ends the server of the row that it is at."""
    for row in rows:
        mine = replace(load, order=row.order, techniques=row.techniques)
        with serving(model, [*options, *row.options]) as url:
            yield row, run_load(url, files, mine, progress=lambda sent, row=row: progress(row.name, sent))  # type: ignore[misc]


@contextlib.contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[str]:
    """`lakh serve MODEL` as a process; gives its URL."""
    command = [sys.executable, "-m", "lakh", "serve", model, "--http", "127.0.0.1:0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            ready: dict[str, Any] = json.loads(_line(process))
            yield str(ready["url"])
            process.terminate()
            process.communicate(timeout=STOP_S)
        finally:
            if process.poll() is None:
                process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    """The line that says it is ready; the server's own words where none comes."""
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
        raise from_dict(answer["error"])  # in its own words, and of its own kind
    if not answer:
        _, words = process.communicate(timeout=STOP_S)
        raise PeerLost("lakh serve", f"did not start: {words.strip()[-300:]}", "try the same command by itself")
    return line
