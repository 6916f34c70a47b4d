"""lakh corpus: build a corpus, report on it, show one document."""

from __future__ import annotations

from dataclasses import asdict

import click

from lakh import config
from lakh.cli.face import Answer, answers, set_option, table
from lakh.cli.progress import progress_bar
from lakh.corpus import REASONS, Document, Report, Settings, build, read_report
from lakh.corpus.find import find

__all__ = ["corpus"]


@click.group()
def corpus() -> None:
    """Raw code to clean Parquet."""


@corpus.command("build")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option("--out", required=True, metavar="DIR", help="Folder or URL for the corpus.")
@click.option("--max-bytes-per-repo", type=click.IntRange(min=0), help="Text that one repository may give; 0: all.")
@click.option("--force", is_flag=True, help="Replace a corpus of other settings or sources.")
@set_option
@answers
def build_command(
    sources: tuple[str, ...], out: str, max_bytes_per_repo: int | None, force: bool, sets: tuple[str, ...]
) -> Answer:
    """Build a corpus from folders and installed code.

    SRC is a folder (or NAME=FOLDER), installed:stdlib, or installed:packages. Settings for --set are, for
    example, filters.max_file_bytes, filters.max_line_chars, per_repo_bytes and seed.
    """
    if max_bytes_per_repo is not None:
        sets = (*sets, f"per_repo_bytes={max_bytes_per_repo}")
    settings = config.with_sets(Settings(), sets, origin="corpus settings")
    with progress_bar() as progress:
        made = build(sources, out, settings, force=force, progress=progress)
    head = f"{out}: already built from the same files, reused" if made.reused else f"{out}: built"
    return Answer(made.as_dict(), _summary(made, head))


@corpus.command("report")
@click.argument("folder", metavar="DIR")
@click.option("--verify", is_flag=True, help="Read every byte and compare it with the manifest.")
@answers
def report_command(folder: str, verify: bool) -> Answer:
    """What a corpus holds, and why the rest was left out."""
    report = read_report(folder)
    checked = report.verify() if verify else None
    data = report.as_dict() | {"verified_files": checked, "settings": dict(report.settings)}
    for name in (
        "reused",
        "seconds",
        "cpu_seconds",
        "mb_per_cpu_second",
    ):  # facts of a build, not of a corpus
        del data[name]
    head = f"{folder}: {checked} files match their manifest" if checked is not None else folder
    return Answer(data, _summary(report, head))


@corpus.command("show")
@click.argument("folder", metavar="DIR")
@click.argument("wanted", metavar="ID")
@answers
def show_command(folder: str, wanted: str) -> Answer:
    """Print one document, or why it was dropped.

    ID is a document's id, the beginning of it, or repo/path.
    """
    found = find(folder, wanted)
    if isinstance(found, Document):
        return Answer({"kept": True, **asdict(found)}, found.text)
    why = f"{found['reason']} ({REASONS[found['reason']]})" + (f": {found['detail']}" if found["detail"] else "")
    return Answer({"kept": False, **found}, f"{found['repo']}/{found['path']} was dropped: {why}")


def _summary(report: Report, head: str) -> str:
    from rich.console import Console

    rows = [("read", report.read, ""), ("kept", report.kept, f"{report.bytes_out / 1e6:,.1f} MB of text")]
    rows += [(f"  dropped: {reason}", count, REASONS.get(reason, "")) for reason, count in report.dropped.items()]
    languages = ", ".join(f"{name} {count:,}" for name, count in report.languages.items())
    licences = ", ".join(f"{name or 'unknown'} {count:,}" for name, count in report.licences.items())
    tail = f"languages: {languages or 'none'}\nlicences: {licences or 'none'}\ncontent: {report.output_sha256}"
    screen = Console()
    with screen.capture() as shown:  # only the table: rich would break paths and hashes, which people copy
        screen.print(table(["documents", "number", ""], rows))
    return f"{head}\n{shown.get()}{tail}"
