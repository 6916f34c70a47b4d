"""lakh corpus: build a corpus, report on it, show one document.

What does the work is imported when a command is called: `--help` needs no extra and answers at once.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lakh import config, storage
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, console, print_result, set_option, table
from lakh.cli.progress import progress_bar
from lakh.errors import UserError

if TYPE_CHECKING:
    from lakh.corpus import Report
    from lakh.corpus.document import Progress
    from lakh.corpus.find import Life

__all__ = ["ENGINES", "corpus"]

ENGINES = ("local", "beam", "spark")  # a test holds them to lakh.corpus.engines
TOLD_S = 20.0
BUILD_FACTS = ("reused", "seconds", "cpu_seconds", "mb_per_cpu_second", "engine", "tasks", "peak_rss_bytes")


@click.group(cls=HintingGroup)
def corpus() -> None:
    """Raw code to clean Parquet."""


@corpus.command("build")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option("--out", required=True, metavar="DIR", help="Folder or URL for the corpus.")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="Who runs the steps.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes; 0: one per core.")
@click.option(
    "--worker-memory", type=click.IntRange(min=512), default=1024, show_default=True, help="MiB that a worker may take."
)
@click.option("--engine-option", "options", multiple=True, metavar="OPTION", help="Beam's --x=y, or Spark's key=value.")
@click.option(
    "--work", default="", metavar="DIR", help="Where unfinished work is kept; DIR/.work of --out if not given."
)
@click.option("--against", multiple=True, metavar="DIR", help="An earlier corpus whose documents are left out.")
@click.option("--part", default="0/1", metavar="I/N", help="Do part I of N, of a job array that shares --out.")
@click.option("--max-bytes-per-repo", type=click.IntRange(min=0), help="Text that one repository may give; 0: all.")
@click.option("--force", is_flag=True, help="Replace a corpus of other settings or sources.")
@click.option("--skip-missing", is_flag=True, help="Count packages that their index does not have, and go on.")
@set_option
@print_result
def build_command(
    sources: tuple[str, ...],
    out: str,
    engine: str,
    workers: int,
    worker_memory: int,
    options: tuple[str, ...],
    work: str,
    against: tuple[str, ...],
    part: str,
    max_bytes_per_repo: int | None,
    force: bool,
    skip_missing: bool,
    sets: tuple[str, ...],
) -> CommandResult:
    """Build a corpus from folders, archives, records and packages.

    SRC is a folder (or NAME=FOLDER), an archive, a .jsonl or .parquet file, Posts.xml, docs:FOLDER, synthetic:FILE,
    git:REPO, pypi:NAME, npm:NAME, debian:NAME, installed:stdlib, installed:packages, or @FILE with such words, one a
    line. Interrupted or killed, the same command goes on where it stood. Settings for --set are, for example,
    filters.max_file_bytes, near.threshold, licences.take, secrets.action and seed.
    """
    from lakh.corpus import Settings, build

    if max_bytes_per_repo is not None:
        sets = (*sets, f"per_repo_bytes={max_bytes_per_repo}")
    settings = config.with_sets(Settings(), sets, origin="corpus settings")
    with progress_bar() as progress:
        made = build(
            sources,
            out,
            settings,
            engine=engine,
            workers=workers,
            memory_bytes=worker_memory << 20,
            member=_part(part),
            work=work,
            against=against,
            options=options,
            force=force,
            skip_missing=skip_missing,
            progress=told_now_and_then(progress),
        )
    head = f"{out}: already built from the same files, reused" if made.reused else f"{out}: built"
    head += "" if made.kept else ", and nothing was kept: below is why"
    return CommandResult(made.as_dict(), _summary(made, head))


@corpus.command("fetch")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option("--skip-missing", is_flag=True, help="Name what its index does not have, and end well.")
@print_result
def fetch_command(sources: tuple[str, ...], skip_missing: bool) -> CommandResult:
    """Fetch packages and repositories into the cache, ahead of a build.

    SRC are pypi:NAME, npm:NAME, debian:NAME, git:REPO, or @FILE with such words.
    """
    from lakh.corpus.sources import fetch_all, open_sources
    from lakh.corpus.sources.fetched import Fetched

    with progress_bar() as progress:
        opened = fetch_all(open_sources(sources), skip_missing=skip_missing, progress=told_now_and_then(progress))
    fetched = [source for source in opened if isinstance(source, Fetched)]
    if not fetched:
        raise UserError(" ".join(sources), "names nothing that is fetched", "give pypi:, npm:, debian: or git: words")
    missing = {source.word: source.missing for source in fetched if source.missing}
    size = sum(listed.size_bytes for source in fetched for listed in source.files())
    data = {"fetched": len(fetched) - len(missing), "missing": missing, "bytes": size}
    lines = [f"{len(fetched) - len(missing):,} packages in the cache, {size / 1e6:,.1f} MB"]
    return CommandResult(data, "\n".join(lines + [f"missing: {word} ({why})" for word, why in missing.items()]))


@corpus.command("report")
@click.argument("folder", metavar="DIR")
@click.option("--verify", is_flag=True, help="Read every byte and compare it with the manifest.")
@click.option("--html", metavar="FILE", help="Also write the report as a page with plots.")
@click.option(
    "--samples", type=click.IntRange(0, 100), default=3, show_default=True, help="Dropped files of each reason."
)
@print_result
def report_command(folder: str, verify: bool, html: str | None, samples: int) -> CommandResult:
    """What a corpus holds, and why the rest was left out."""
    from lakh.corpus import read_report
    from lakh.corpus.find import examples
    from lakh.corpus.report_html import report_html

    report = read_report(folder)
    checked = report.verify() if verify else None
    data = report.as_dict() | {"verified_files": checked, "settings": dict(report.settings)}
    for name in BUILD_FACTS:  # facts of a build, not of a corpus
        del data[name]
    data["funnel"] = [{"reason": reason, "dropped": gone, "left": left} for reason, gone, left in report.funnel()]
    shown = examples(folder, samples)
    data["samples"] = {
        "redacted": [dict(item) for item in report.samples],
        "dropped": {reason: [{"place": row[0], "detail": row[1]} for row in rows] for reason, rows in shown.items()},
    }
    head = f"{folder}: {checked} files match their manifest" if checked is not None else folder
    if html:
        storage.write_bytes(html, report_html(report, shown).encode())
        data["html"] = html
        head += f"\npage: {html}"
    return CommandResult(data, _summary(report, head))


@corpus.command("show")
@click.argument("folder", metavar="DIR")
@click.argument("wanted", metavar="ID")
@click.option("--life", is_flag=True, help="Tell what was decided about it instead of printing the text.")
@print_result
def show_command(folder: str, wanted: str, life: bool) -> CommandResult:
    """Print one document, or why it was dropped; or its life.

    ID is a document's id, the beginning of it, or repo/path.
    """
    from lakh.corpus.find import find

    found = find(folder, wanted)
    data = {"kept": found.document is not None, "id": found.id, "repo": found.repo, "path": found.path}
    if found.document is None:
        data |= {"reason": found.reason, "detail": found.detail, "text": found.dropped_text}
        return CommandResult(data, _dropped(found))
    data |= asdict(found.document) | {"won_over": [{"reason": a, "place": b} for a, b in found.won_over]}
    return CommandResult(data, _life(found) if life else found.document.text)


def told_now_and_then(progress: Progress) -> Progress:
    """The bar; where stderr is no terminal, and there is none, a line on it every TOLD_S."""
    talk, last_s = console(), time.monotonic()
    if talk.is_terminal:
        return progress

    def told(what: str, done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= TOLD_S:
            last_s = now_s
            talk.print(f"{what}: {done / max(total, 1):.0%} of {total:,}")

    return told


def _part(text: str) -> tuple[int, int]:
    number, sign, of = text.partition("/")
    if not (sign and number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise UserError(f"--part {text}", "is no I/N with I from 0 up to N - 1", "write for example --part 3/16")
    return int(number), int(of)


def _dropped(found: Life) -> str:
    from lakh.corpus import REASONS

    why = f"{found.reason} ({REASONS.get(found.reason, '')})" + (f": {found.detail}" if found.detail else "")
    return f"{found.repo}/{found.path} was dropped: {why}"


def _life(found: Life) -> str:
    document = found.document
    assert document is not None
    licence = f"{document.licence} ({document.licence_evidence})" if document.licence else "nothing is known"
    lines = [
        f"{found.repo}/{found.path}",
        f"  id        {found.id}",
        f"  came from {document.source}" + (f", which says {document.provenance}" if document.provenance else ""),
        f"  language  {document.language}" + (f", marked {document.marks}" if document.marks else ""),
        f"  licence   {licence}",
        f"  kept      {len(document.text.encode()):,} bytes, sha256 {document.sha256}",
        *(f"  won over  {place} ({reason})" for reason, place in found.won_over),
    ]
    return "\n".join(lines)


def _summary(report: Report, head: str) -> str:
    from rich.console import Console

    from lakh.corpus import REASONS

    rows = [("read", report.read, ""), ("kept", report.kept, f"{report.bytes_out / 1e6:,.1f} MB of text")]
    rows += [(f"  dropped: {reason}", count, REASONS.get(reason, "")) for reason, count, _ in report.funnel()]
    languages = ", ".join(f"{name} {count:,}" for name, count in report.languages.items())
    licences = ", ".join(f"{name or 'unknown'} {count:,}" for name, count in report.licences.items())
    secrets = ", ".join(f"{name} {count:,}" for name, count in report.secrets.items())
    tail = f"languages: {languages or 'none'}\nlicences: {licences or 'none'}\nredacted: {secrets or 'nothing'}\n"
    screen = Console()
    with screen.capture() as shown:  # only the table: rich would break paths and hashes, which people copy
        screen.print(table(["documents", "number", ""], rows))
    return f"{head}\n{shown.get()}{tail}content: {report.output_sha256}"
