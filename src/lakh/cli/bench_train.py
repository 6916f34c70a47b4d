"""lakh bench train: training speed beside transformers' Llama of the same shape."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.face import Answer, answers, table

__all__ = ["train"]


@click.command("train")
@click.option("--shapes", default="demo", show_default=True, help="Comma-separated names of model shapes.")
@click.option("--repeats", type=click.IntRange(min=3), default=7, show_default=True, help="Timed steps of each system.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@answers
def train(shapes: str, repeats: int, out: str | None) -> Answer:
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
        data["file"] = keep(Path(out), "train", command, data)
    return Answer(data, table(list(rows[0]), [list(row.values()) for row in rows]))
