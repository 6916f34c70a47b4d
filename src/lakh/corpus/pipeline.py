"""Build a corpus: survey the sources, plan, run the steps on an engine, commit.

    sources -> listing -> plan -> steps (build_steps.py) on an engine (engines/) -> shards -> manifest.json, last

A build that is interrupted at any moment leaves its work folder (OUT/.work, or `work`) and no manifest: it never looks
complete, and the same command resumes it. The shards are the same bytes for every engine, number of workers and number
of interruptions.

Fails with UserError (sources, another corpus in the way, another build in the same folder) and DiskFull.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lakh import __version__, config, storage
from lakh.corpus import sources as listing
from lakh.corpus.build_plan import (
    AlreadyBuilt,
    CorpusBuildPlan,
    SourceSurvey,
    make_build_plan,
    read_benchmark_files,
    survey,
)
from lakh.corpus.build_steps import run_steps
from lakh.corpus.document import Progress
from lakh.corpus.engines import (
    MEMBER_POLL_S,
    MEMBER_TIMEOUT_S,
    MEMORY_PER_WORKER_BYTES,
    EngineOptions,
    open_engine,
)
from lakh.corpus.reports.card import CARD, MADE, card
from lakh.corpus.reports.report import FIELDS, CorpusReport, read_report
from lakh.corpus.settings import Settings
from lakh.corpus.shards import FORMAT, MADE_BY, check_shard
from lakh.corpus.writer import CorpusCounts
from lakh.errors import LakhError, PeerLost, PeerTimeout, UserError

__all__ = ["Settings", "build"]

WORK = ".work"
VERSIONED = ("pyarrow", "numba", "tree-sitter", "hyperscan", "google-re2")
OUR_FILES = re.compile(r"\.?(docs|dropped)-\d+\.parquet(\..*\.part)?|dropped\.parquet")


def build(
    sources: Sequence[str],
    out: str | Path,
    settings: Settings | None = None,
    *,
    engine: str = "local",
    workers: int = 0,
    memory_bytes: int = MEMORY_PER_WORKER_BYTES,
    member: tuple[int, int] = (0, 1),
    work: str = "",
    against: Sequence[str] = (),
    options: Sequence[str] = (),
    force: bool = False,
    skip_missing: bool = False,
    progress: Progress | None = None,
) -> CorpusReport:
    """Build a corpus from `sources` (see lakh.corpus.sources) in the folder or URL `out`.

    A finished corpus of the same settings and sources is returned as it is, with `reused` set; any other one is
    replaced only with `force`. `workers` = 0 starts one per core, each with at most `memory_bytes`; `member` = (index,
    count) is one part of a job array that shares the work folder. Documents of the corpora in `against`, and copies of
    them, are excluded. With `skip_missing`, packages that their index does not have are counted and skipped.
    """
    started_s, cpu_started_s = time.monotonic(), time.process_time()
    engine_options = EngineOptions(
        workers=workers, memory_bytes=memory_bytes, member=member, framework=options, progress=progress
    )
    settings, url = settings or Settings(), str(out)
    work = work or storage.join(url, WORK)
    exclude = storage.real_path(url) if storage.is_local(url) else None
    opened = listing.fetch_all(listing.open_sources(sources, exclude), skip_missing=skip_missing, progress=progress)
    if member[1] > 1 and force:
        raise UserError("--force", "a job array cannot replace a corpus", "remove it first, then start the array")
    earlier = [read_report(str(corpus)) for corpus in against]
    # In a job array member 0 decides: the other machines may have other benchmarks at hand.
    benchmarks = read_benchmark_files(settings.decontaminate) if member[0] == 0 else None
    with _lock(work, member):
        found = survey(opened, settings, work, member[0])
        report = _reusable(url, settings, found, earlier, benchmarks, force)
        if report is None:
            report = _build_new(found, settings, url, work, earlier, benchmarks, engine, engine_options)
        if report is None:
            return _await_corpus(url)
    storage.remove_tree(work)
    cpu_seconds = report.cpu_seconds + time.process_time() - cpu_started_s
    return replace(report, seconds=time.monotonic() - started_s, cpu_seconds=cpu_seconds)


def _build_new(
    found: SourceSurvey,
    settings: Settings,
    url: str,
    work: str,
    earlier: Sequence[CorpusReport],
    benchmarks: Mapping[str, bytes] | None,
    engine: str,
    options: EngineOptions,
) -> CorpusReport | None:
    """Run the build and commit the corpus; None in a member of a job array for which member 0 commits."""
    storage.require_space(url, found.code_bytes // 2)  # spool and shards compress to about a quarter each
    index = options.member[0]
    try:
        plan = make_build_plan(found, settings, url, work, earlier, index, benchmarks)
        if index == 0:
            _clear(url, plan)
        running = open_engine(engine, plan, options)
        with contextlib.closing(running):
            counts = run_steps(running, plan)
    except (AlreadyBuilt, LakhError, OSError):
        # A member with nothing left to do may still be reading when the others finish the build and remove the work
        # folder.
        if index == 0 or not storage.is_complete(url):
            raise
        return None
    if counts is None:
        return None
    report = _report(plan, counts, earlier)
    _write_card(url, card(report))
    storage.commit(url, report.manifest())
    tasks, peak = {"run": running.tasks_run, "reused": running.tasks_reused}, running.peak_rss_bytes
    return replace(report, engine=engine, tasks=tasks, peak_rss_bytes=peak, cpu_seconds=running.cpu_seconds)


def _write_card(url: str, text: str) -> None:
    """Write README.md, unless there is one that lakh did not write."""
    place = storage.join(url, CARD)
    if not storage.exists(place) or MADE.encode() in storage.read_bytes(place):
        storage.write_bytes(place, text.encode())


def _await_corpus(url: str) -> CorpusReport:
    deadline_s = time.monotonic() + MEMBER_TIMEOUT_S
    while not storage.is_complete(url):
        if time.monotonic() > deadline_s:
            found = f"part 0 did not commit within MEMBER_TIMEOUT_S = {MEMBER_TIMEOUT_S:g} s"
            raise PeerTimeout(url, found, "look at part 0")
        time.sleep(MEMBER_POLL_S)
    return read_report(url)


@contextlib.contextmanager
def _lock(work: str, member: tuple[int, int]) -> Iterator[None]:
    """Lock a local work folder. Members of a job array share one, and object stores have no locks."""
    if not storage.is_local(work) or member[1] > 1:
        yield
        return
    storage.make_dir(work)
    with (storage.local_path(work) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PeerLost(work, "another build is running here", "wait for it, or choose another --out") from None
        except OSError:  # a file system without locks
            pass
        yield


def _reusable(
    url: str,
    settings: Settings,
    found: SourceSurvey,
    earlier: Sequence[CorpusReport],
    benchmarks: Mapping[str, bytes] | None,
    force: bool,
) -> CorpusReport | None:
    """The existing corpus if it matches the request; `force` replaces a corpus and nothing else."""
    if storage.manifest_to_reuse(url, kind=FORMAT, made_by=MADE_BY, force=force) is None:
        return None
    old = read_report(url)
    differs = [
        what
        for what, same in (
            ("settings", old.settings == config.to_dict(settings)),
            ("sources", old.sources == found.sources),
            ("files", old.listing_sha256 == found.listing_sha256),
            ("benchmarks", benchmarks is None or old.benchmarks == _benchmark_hashes(benchmarks)),
            ("earlier corpora", set(old.earlier) == {report.output_sha256 for report in earlier}),
        )
        if not same
    ]
    if differs:
        wrong = f"already holds a corpus with other {' and '.join(differs)}"
        raise UserError(url, wrong, "choose another --out, or replace it with --force")
    for entry in (*old.shards, *old.dropped_files):
        check_shard(url, entry)  # fails if a file is missing or short
    return replace(old, reused=True)


def _benchmark_hashes(benchmarks: Mapping[str, bytes]) -> dict[str, str]:
    return {name.rpartition("/")[2]: hashlib.sha256(content).hexdigest() for name, content in benchmarks.items()}


def _clear(url: str, plan: CorpusBuildPlan) -> None:
    """Remove the files of an earlier build, the manifest first, and nothing else; a resumed build keeps its shards."""
    storage.remove_tree(storage.join(url, storage.MANIFEST))
    if storage.list_dir(storage.join(plan.work, "finish")):
        return
    for name in storage.list_dir(url):
        if OUR_FILES.fullmatch(name):
            storage.remove_tree(storage.join(url, name))


def _report(plan: CorpusBuildPlan, counts: CorpusCounts, earlier: Sequence[CorpusReport]) -> CorpusReport:
    def files(kind: str) -> tuple[dict[str, object], ...]:
        return tuple(entry for entry in counts.files if str(entry["file"]).startswith(kind))

    counted = {name: value for name, value in vars(counts).items() if name in FIELDS}
    values: dict[str, Any] = {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in counted.items()
    }
    return CorpusReport(
        **values | {"samples": tuple(counts.samples)},
        out=plan.out,
        settings=config.to_dict(plan.settings),
        sources=plan.survey.sources,
        listing_sha256=plan.survey.listing_sha256,
        earlier=tuple(sorted(report.output_sha256 for report in earlier)),
        benchmarks={name.rpartition("/")[2]: sha256 for name, sha256 in plan.benchmarks.items()},
        versions=_versions(),
        shards=files("docs-"),
        dropped_files=files("dropped-"),
        output_sha256=f"{counts.content:064x}",
    )


def _versions() -> dict[str, str]:
    found = {"lakh": __version__}
    for package in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
