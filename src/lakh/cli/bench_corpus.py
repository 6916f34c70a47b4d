"""lakh bench corpus: speed of a corpus build beside datatrove's filters and MinHash deduplication."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.output import CommandResult, console, print_result, table

__all__ = ["corpus"]

PARTS = ("peer", "stages", "sample", "tokens", "full", "memory")  # lakh.corpus.bench says what they are


@click.command("corpus")
@click.argument("sources", nargs=-1, metavar="[SRC]...")
@click.option(
    "--sample-mb", type=click.FloatRange(min=1), default=24.0, show_default=True, help="What both systems get."
)
@click.option("--full-mb", type=click.FloatRange(min=1), default=300.0, show_default=True, help="What lakh alone gets.")
@click.option(
    "--memory-mb",
    type=click.FloatRange(min=1),
    default=3000.0,
    show_default=True,
    help="For the memory row.",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Measure these alone; all but memory if none.",
)
@click.option(
    "--work", type=click.Path(file_okay=False), help="Folder for the records and results; a temporary one if not given."
)
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@print_result
def corpus(
    sources: tuple[str, ...],
    sample_mb: float,
    full_mb: float,
    memory_mb: float,
    parts: tuple[str, ...],
    work: str | None,
    out: str | None,
) -> CommandResult:
    """Corpus speed beside datatrove's filters and MinHash.

    SRC are sources as for `lakh corpus build`; without any, pinned packages in eight languages are fetched.
    """
    from lakh.corpus.bench import bench_corpus
    from lakh.corpus.bench_sources import fetch_pinned

    talk = console()
    words = list(sources) or [str(path) for path in fetch_pinned(talk.print)]
    with tempfile.TemporaryDirectory(prefix="lakh-bench-corpus-") as scratch:
        folder = Path(work or scratch) / "bench"
        sizes = {"sample": sample_mb, "full": full_mb, "memory": memory_mb}
        wanted = parts or tuple(part for part in PARTS if part != "memory")
        rows = bench_corpus(words, folder, sizes_mb=sizes, parts=wanted, say=talk.print)
    data = {
        "machine": machine(),
        "sources": [word.rpartition("/")[2] for word in words],
        "rows": [asdict(row) for row in rows],
    }
    if out:
        chosen = "".join(f" --part {part}" for part in parts)
        command = f"lakh bench corpus --sample-mb {sample_mb:g} --full-mb {full_mb:g} --memory-mb {memory_mb:g}{chosen}"
        data["file"] = keep(Path(out), "corpus", command, data)
    shown = [
        (row.system, row.stage, row.input_mb, row.workers, row.mb_per_cpu_second, row.wall_s, row.peak_rss_bytes / 1e6)
        for row in rows
    ]
    return CommandResult(data, table(["system", "stage", "MB", "workers", "MB/CPU-s", "wall s", "peak MB"], shown))
