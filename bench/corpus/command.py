"""lakh bench corpus: corpus builds beside datatrove's filters and MinHash deduplication."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from bench.harness import Peer, detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, print_result
from lakh.errors import MissingExtra

__all__ = ["corpus"]

PARTS = ("peer", "stages", "sample", "tokens", "full", "memory")  # described in build.py
PEERS = (Peer("datatrove", ("datatrove", "spacy", "xxhash")),)
SIZE = click.FloatRange(min=1)
COLUMNS = {
    "system": "system",
    "stage": "stage",
    "input_mb": "MB",
    "workers": "workers",
    "mb_per_cpu_second": "MB/CPU-s",
    "wall_s": "wall s",
    "peak_rss_bytes": "peak bytes",
    "failed": "failed",
}


@click.command("corpus")
@click.argument("sources", nargs=-1, metavar="[SRC]...")
@click.option("--sample-mb", type=SIZE, default=24.0, show_default=True, help="Input of both systems, in MB.")
@click.option("--full-mb", type=SIZE, default=300.0, show_default=True, help="Input of lakh alone, in MB.")
@click.option("--memory-mb", type=SIZE, default=3000.0, show_default=True, help="Input of the memory part, in MB.")
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Measure only this part. Repeatable. Default: all but memory.",
)
@click.option("--work", type=click.Path(file_okay=False), help="Folder for records and outputs; default: temporary.")
@out_option
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
    """Compare the speed of corpus builds with datatrove.

    SRC are sources as for `lakh corpus build`. Without any, pinned packages in eight languages are downloaded.
    """
    wanted = list(parts or (part for part in PARTS if part != "memory"))
    if "peer" in wanted and not detect_peers(["datatrove"], PEERS, log):
        wanted.remove("peer")
    if not wanted:
        raise MissingExtra("--part peer", "datatrove", "bench")
    from bench.corpus.build import bench_corpus
    from bench.corpus.pinned import fetch_pinned

    words = list(sources) or [str(path) for path in fetch_pinned(log)]
    sizes = {"sample": sample_mb, "full": full_mb, "memory": memory_mb}
    with tempfile.TemporaryDirectory(prefix="lakh-bench-corpus-") as scratch:
        rows = bench_corpus(words, Path(work or scratch) / "bench", sizes_mb=sizes, parts=wanted, log=log)
    columns = COLUMNS if any(row["failed"] for row in rows) else {k: v for k, v in COLUMNS.items() if k != "failed"}
    return result("corpus", rows, out, columns=columns, sources=[word.rpartition("/")[2] for word in words])
