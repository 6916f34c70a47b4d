"""lakh corpus: build a corpus, report on it, show one document.

The library is imported when a command runs, so `--help` needs no extra and is fast.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import click

from lakh import config, storage
from lakh.cli.corpus_plan import plan_command
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, console, print_result, set_option, table
from lakh.cli.progress import progress_bar
from lakh.cli.synthesize import synthesize_command
from lakh.errors import UserError

if TYPE_CHECKING:
    from lakh.corpus import CorpusReport
    from lakh.corpus.document import Progress

__all__ = ["ENGINES", "corpus"]

ENGINES = ("local", "beam", "spark")  # a test compares them with lakh.corpus.engines
PROGRESS_LINE_S = 20.0
TAKE_MORE = (
    "dropped for their licence: your own code is accepted as own:SRC, other classes by "
    '--set \'licences.take=["permissive", "none"]\'\n'
)
NOT_DECONTAMINATED = (
    "no: no benchmark data is here. `lakh eval` downloads some, pip install 'lakh[eval]' has HumanEval, "
    "--set 'decontaminate.benchmarks=[\"FILE.jsonl\"]' names your own"
)


@click.group(cls=HintingGroup)
def corpus() -> None:
    """Raw code to clean Parquet."""


@corpus.command("build")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option("--out", required=True, metavar="DIR", help="Folder or URL for the corpus.")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="Where the steps run.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes; 0: one per core.")
@click.option(
    "--worker-memory",
    type=click.IntRange(min=512),
    default=1024,
    show_default=True,
    help="Memory limit of a worker, MiB.",
)
@click.option("--engine-option", "options", multiple=True, metavar="OPTION", help="Beam's --x=y, or Spark's key=value.")
@click.option("--work", default="", metavar="DIR", help="Folder for unfinished work; default: .work in --out.")
@click.option("--against", multiple=True, metavar="DIR", help="An earlier corpus whose documents are excluded.")
@click.option("--part", default="0/1", metavar="I/N", help="Run part I of N of a job array that shares --out.")
@click.option(
    "--max-bytes-per-repo", type=click.IntRange(min=0), help="Bytes of text to keep of one repository; 0: all."
)
@click.option("--force", is_flag=True, help="Replace a corpus of other settings or sources.")
@click.option("--skip-missing", is_flag=True, help="Count packages that their index does not have, and continue.")
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
    git:REPO, pypi:NAME, npm:NAME, debian:NAME, installed:stdlib, installed:packages, or @FILE with one SRC a line.
    Only permissive licences are accepted; write own:SRC for your own code, which needs none. After an interruption,
    the same command resumes the build. Settings for --set are, for example, filters.max_file_bytes, near.threshold,
    licences.take, secrets.action and seed.
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
            progress=periodic_progress(progress),
        )
    head = f"{out}: already built from the same files, reused" if made.reused else f"{out}: built"
    head += "" if made.kept else ", and nothing was kept for the reasons below"
    return CommandResult(made.as_dict(), _summary(made, head))


@corpus.command("fetch")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option("--skip-missing", is_flag=True, help="List packages that their index does not have, and exit with 0.")
@print_result
def fetch_command(sources: tuple[str, ...], skip_missing: bool) -> CommandResult:
    """Fetch packages and repositories into the cache, ahead of a build.

    SRC are pypi:NAME, npm:NAME, debian:NAME, git:REPO, or @FILE with one of them a line.
    """
    from lakh.corpus.sources import fetch_packages

    with progress_bar() as progress:
        fetched = fetch_packages(sources, skip_missing=skip_missing, progress=periodic_progress(progress))
    lines = [f"{fetched.num_packages:,} packages in the cache, {fetched.size_bytes / 1e6:,.1f} MB"]
    lines += [f"missing: {package} ({reason})" for package, reason in fetched.missing.items()]
    data = {"fetched": fetched.num_packages, "missing": fetched.missing, "bytes": fetched.size_bytes}
    return CommandResult(data, "\n".join(lines))


corpus.add_command(synthesize_command)
corpus.add_command(plan_command)


@corpus.command("report")
@click.argument("folder", metavar="DIR")
@click.option("--verify", is_flag=True, help="Read every byte and compare it with the manifest.")
@click.option("--html", metavar="FILE", help="Also write the report as a page with plots.")
@click.option(
    "--samples",
    type=click.IntRange(0, 100),
    default=3,
    show_default=True,
    help="Number of dropped files to show for each reason.",
)
@print_result
def report_command(folder: str, verify: bool, html: str | None, samples: int) -> CommandResult:
    """Show what a corpus contains, and why the rest was dropped."""
    from lakh.corpus import read_report
    from lakh.corpus.reports.html_page import report_html
    from lakh.corpus.reports.lookup import dropped_examples, duplicate_clusters

    report = read_report(folder)
    checked = report.verify() if verify else None
    examples = dropped_examples(folder, samples)
    clusters = duplicate_clusters(folder)
    data = report.summary(examples) | {"verified_files": checked}
    data["duplicate_clusters"] = [dataclasses.asdict(cluster) for cluster in clusters]
    head = f"{folder}: {checked} files match their manifest" if checked is not None else folder
    if html:
        storage.write_bytes(html, report_html(report, examples, clusters).encode())
        data["html"] = html
        head += f"\npage: {html}"
    return CommandResult(data, _summary(report, head))


@corpus.command("show")
@click.argument("folder", metavar="DIR")
@click.argument("wanted", metavar="ID")
@click.option("--history", is_flag=True, help="Show what the build decided about it instead of the text.")
@click.option("--life", is_flag=True, hidden=True, help="The old name of --history.")
@print_result
def show_command(folder: str, wanted: str, history: bool, life: bool) -> CommandResult:
    """Print one document, its history, or why it was dropped.

    ID is a document's id, the beginning of it, or repo/path.
    """
    from lakh.corpus.reports.lookup import find_document

    found = find_document(folder, wanted)
    show_text = found.document is not None and not (history or life)
    return CommandResult(found.as_dict(), found.document.text if found.document and show_text else found.describe())


def periodic_progress(progress: Progress) -> Progress:
    """The progress bar, or without a terminal a line on stderr every PROGRESS_LINE_S."""
    stderr, last_s = console(), time.monotonic()
    if stderr.is_terminal:
        return progress

    def print_line(activity: str, done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= PROGRESS_LINE_S:
            last_s = now_s
            stderr.print(f"{activity}: {done / max(total, 1):.0%} of {total:,}")

    return print_line


def _part(text: str) -> tuple[int, int]:
    number, sign, of = text.partition("/")
    if not (sign and number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise UserError(f"--part {text}", "is not I/N with I from 0 up to N - 1", "write for example --part 3/16")
    return int(number), int(of)


def _summary(report: CorpusReport, head: str) -> str:
    from rich.console import Console

    from lakh.corpus import REASONS

    rows = [("read", report.read, ""), ("kept", report.kept, f"{report.bytes_out / 1e6:,.1f} MB of text")]
    rows += [(f"  dropped: {reason}", count, REASONS.get(reason, "")) for reason, count, _ in report.funnel()]
    languages = ", ".join(f"{name} {count:,}" for name, count in report.languages.items())
    licences = ", ".join(f"{name or 'unknown'} {count:,}" for name, count in report.licences.items())
    secrets = ", ".join(f"{name} {count:,}" for name, count in report.secrets.items())
    tail = f"languages: {languages or 'none'}\nlicences: {licences or 'none'}\nredacted: {secrets or 'nothing'}\n"
    if report.dropped.get("licence"):
        tail += TAKE_MORE
    tail += f"decontaminated: {', '.join(report.benchmarks) or NOT_DECONTAMINATED}\n"
    screen = Console()
    with screen.capture() as shown:  # only the table: rich would break paths and hashes
        screen.print(table(["documents", "number", ""], rows))
    return f"{head}\n{shown.get()}{tail}content: {report.output_sha256}"
