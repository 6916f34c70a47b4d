"""lakh bench decode: decoding speed beside transformers and llama.cpp on the same weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.output import CommandResult, console, print_result, table

__all__ = ["decode"]


@click.command("decode")
@click.argument("model", required=False)
@click.option("--shape", default="135m", show_default=True, help="Random weights, without a MODEL.")
@click.option("--systems", default="", help="Comma-separated; all that run here by default.")
@click.option("--batch", default="1", show_default=True, help="Comma-separated numbers of rows.")
@click.option("--prompt", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each prompt.")
@click.option("--new", type=click.IntRange(2), default=48, show_default=True, help="New tokens of each row.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds; the best is shown.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of every system.")
@click.option("--speculation", is_flag=True, help="What guessing is worth instead, on edits of real code.")
@click.option("--draft", metavar="MODEL", help="With --speculation: also a smaller model that guesses.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@print_result
def decode(
    model: str | None,
    shape: str,
    systems: str,
    batch: str,
    prompt: int,
    new: int,
    repeats: int,
    threads: int,
    speculation: bool,
    draft: str | None,
    out: str | None,
) -> CommandResult:
    """Decoding speed beside transformers and llama.cpp on the same weights."""
    import torch

    from lakh.errors import UserError
    from lakh.server.bench.decode import SHAPES, SYSTEMS, bench_decode, random_model
    from lakh.server.bench.speculation import bench_speculation

    names = [name.strip() for name in systems.split(",") if name.strip()] or list(SYSTEMS)
    for name in names:
        if name not in SYSTEMS:
            raise UserError(f"--systems {name}", "no such system", f"choose from: {', '.join(SYSTEMS)}")
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}", "no such shape", f"choose from: {', '.join(SHAPES)}")
    try:
        batches = [int(item) for item in batch.split(",")]
    except ValueError:
        raise UserError(f"--batch {batch}", "is not a list of numbers", "write e.g. --batch 1,8,64") from None
    if min(batches) < 1:
        raise UserError(f"--batch {batch}", "has a number below 1", "write e.g. --batch 1,8,64")
    if draft and not speculation:
        raise UserError("--draft", "has no meaning without --speculation", "add it")
    torch.set_num_threads(threads)
    talk = console()
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as scratch, talk.status("making weights") as status:
        folder = Path(model) if model else random_model(shape, Path(scratch))
        if speculation:
            guessing = Path(draft) if draft else None
            rows = bench_speculation(folder, draft=guessing, new=new, repeats=repeats, progress=status.update)
        else:
            rows = bench_decode(
                folder,
                systems=names,
                batches=batches,
                prompt=prompt,
                new=new,
                repeats=repeats,
                progress=status.update,
            )
    data = {"machine": machine(), "rows": rows}
    if out:
        chosen = f"{Path(model).name}" if model else f"--shape {shape}"
        what = f"--batch {batch} --prompt {prompt}"
        if speculation:
            what = f"--speculation --draft {Path(draft).name}" if draft else "--speculation"
        command = f"lakh bench decode {chosen} {what} --new {new} --repeats {repeats} --threads {threads}"
        data["file"] = keep(Path(out), "speculation" if speculation else "decode", command, data)
    return CommandResult(data, table(list(rows[0]), [list(row.values()) for row in rows]))
