"""lakh bench: measured against the peer named, in the same run."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lakh.cli.face import Answer, answers, table

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure lakh against a peer, in the same run."""


@bench.command("train")
@click.option("--shapes", default="demo", show_default=True, help="Comma-separated names of model shapes.")
@click.option("--repeats", type=click.IntRange(min=3), default=7, show_default=True, help="Timed steps of each system.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@answers
def train_(shapes: str, repeats: int, out: str | None) -> Answer:
    """Training speed beside transformers' Llama of the same shape."""
    from lakh.errors import UserError
    from lakh.trainer.bench import SHAPES, bench_train

    names = [name.strip() for name in shapes.split(",")]
    for name in names:
        if name not in SHAPES:
            raise UserError(f"--shapes {name}", "no such shape", f"choose from: {', '.join(SHAPES)}")
    rows = [asdict(row) for name in names for row in bench_train(name, repeats=repeats)]
    data = {"machine": machine(), "rows": rows}
    if out:
        command = f"lakh bench train --shapes {shapes} --repeats {repeats}"
        data["file"] = _keep(Path(out), "train", command, data)
    return Answer(data, table(list(rows[0]), [list(row.values()) for row in rows]))


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure."""
    import torch

    return {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _keep(folder: Path, theme: str, command: str, data: dict[str, Any]) -> str:
    """Write <theme>_<hardware>_<date>.md: complete by itself."""
    from lakh import storage

    where = data["machine"]
    hardware = (where["gpu"] or f"{where['cores']}x{where['cpu']}").replace(" ", "-")
    rows = data["rows"]
    lines = [f"# {theme}, {hardware}, {where['date']}", "", f"command: `{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in where.items()]
    lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_figure(value) for value in row.values()) + " |" for row in rows]
    path = folder / f"{theme}_{hardware}_{where['date']}.md"
    storage.write_bytes(path, ("\n".join(lines) + "\n").encode())
    return str(path)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
