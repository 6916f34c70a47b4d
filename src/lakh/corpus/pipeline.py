"""A corpus from start to end, on this machine, in one process.

    sources -> listing -> read_files -> spool        `Copies` learns which copy of each text to keep
    spool -> keep_one_copy -> cap_repositories -> shards + dropped.parquet -> manifest.json, last

The stages are the plain functions of parse.py and dedup.py; this module only strings them together, writes
what comes out and counts. Memory: one batch of about 8 MB of text, and the entries of `Copies`.

Fails with UserError (sources, or another corpus in the way) and DiskFull. A build that stops half-way leaves
no manifest, so it never looks complete; the next one clears what it left.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow.compute as pc

from lakh import config, storage
from lakh.corpus import sources as listing
from lakh.corpus.dedup import Copies, cap_repositories, keep_one_copy, over_share
from lakh.corpus.document import DOCUMENT, DROPPED, STREAM, Progress, Stage
from lakh.corpus.parse import Filters, admit, read_files
from lakh.corpus.report import Report, content_sum, read_report
from lakh.corpus.shards import FORMAT, MADE_BY, ParquetOut, check_shard, read_rows
from lakh.errors import ConfigError, UserError

__all__ = ["Settings", "build"]

SPOOL = ".spool"
OUR_FILES = re.compile(r"docs-\d+\.parquet|dropped\.parquet|\.spool|\.(docs-\d+\.parquet|dropped\.parquet)\..*\.part")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything, besides the sources, that decides what a corpus holds."""

    filters: Filters = field(default_factory=Filters)
    per_repo_bytes: int = 0
    """Bytes of text that one repository may give; 0 sets no limit."""
    seed: int = 0
    """Decides which files of a repository are taken when it has more than its share."""
    shard_text_bytes: int = 64_000_000
    """A shard is closed when it holds this many bytes of text."""

    def __post_init__(self) -> None:
        config.require_positive(self, "shard_text_bytes")
        if self.per_repo_bytes < 0:
            raise ConfigError("per_repo_bytes", f"{self.per_repo_bytes} is negative", "use 0 for no limit")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", f"{self.seed} is out of range", "choose 0 up to 2**63 - 1")


def build(
    sources: Sequence[str],
    out: str | Path,
    settings: Settings | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Build a corpus from the sources that these words name (sources.py) in folder or URL `out`.

    A finished corpus of the same settings and sources is returned as it is, with `reused` set; another one is
    replaced only with `force`.
    """
    started_s, cpu_started_s = time.monotonic(), time.process_time()
    settings, url = settings or Settings(), str(out)
    exclude = storage.local_path(url).resolve() if storage.is_local(url) else None
    opened = listing.open_sources(sources, exclude)
    survey = _survey(opened, settings.filters)
    report = _finished(url, settings, opened, survey.listing_sha256, force)
    if report is None:
        storage.require_space(url, survey.code_bytes // 2)  # spool and shards compress to about a quarter each
        _clear(url)
        report = _build(opened, url, settings, survey.code_bytes, progress)
    return replace(report, seconds=time.monotonic() - started_s, cpu_seconds=time.process_time() - cpu_started_s)


# --- before -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Survey:
    listing_sha256: str
    code_bytes: int


def _survey(opened: Sequence[listing.Source], filters: Filters) -> _Survey:
    """Walk the sources once without opening a file: are they there, did they change, how much is it?"""
    code_bytes = 0
    owner: dict[str, str] = {}

    def watched() -> Iterator[Any]:
        nonlocal code_bytes
        for batch in listing.batches(opened):
            for row in batch.to_pylist():
                other = owner.setdefault(row["repo"], row["source"])
                if other != row["source"]:
                    found = f"{other} has a repository of that name too"
                    raise UserError(f"repository {row['repo']}", found, "name the folder: NEWNAME=PATH")
                if not row["reason"] and not admit(row["path"], row["size_bytes"], filters)[0]:
                    code_bytes += row["size_bytes"]
            yield batch

    fingerprint = listing.Fingerprint()
    for _ in fingerprint.watch(watched()):
        pass
    return _Survey(fingerprint.hexdigest(), code_bytes)


def _finished(
    url: str, settings: Settings, opened: Sequence[listing.Source], listing_sha256: str, force: bool
) -> Report | None:
    """The corpus that is there, if it is the one asked for; `force` replaces a corpus and nothing else."""
    if storage.manifest_to_reuse(url, kind=FORMAT, made_by=MADE_BY, force=force) is None:
        return None
    old = read_report(url)
    differs = [
        what
        for what, same in (
            ("settings", old.settings == config.to_dict(settings)),
            ("sources", old.sources == tuple(source.name for source in opened)),
            ("files", old.listing_sha256 == listing_sha256),
        )
        if not same
    ]
    if differs:
        found = f"already holds a corpus with other {' and '.join(differs)}"
        raise UserError(url, found, "choose another --out, or replace it with --force")
    for entry in (*old.shards, old.dropped_file):
        check_shard(url, entry)  # raises where a file is missing or short
    return replace(old, reused=True)


def _clear(url: str) -> None:
    """Remove what an earlier build left, the manifest first, and nothing that is not ours."""
    storage.remove_tree(storage.join(url, storage.MANIFEST))
    for name in storage.list_dir(url):
        if OUR_FILES.fullmatch(name):
            storage.remove_tree(storage.join(url, name))


# --- the build --------------------------------------------------------------------------------------------------------


def _build(
    opened: Sequence[listing.Source], url: str, settings: Settings, code_bytes: int, progress: Progress | None
) -> Report:
    # Next to the shards where that is a disk: texts may be too many for /tmp.
    spool = storage.join(url, SPOOL) if storage.is_local(url) else tempfile.mkdtemp(prefix="lakh-corpus-")
    try:
        fingerprint, copies, done = listing.Fingerprint(), Copies(), 0
        with ParquetOut(spool, "parsed.parquet", STREAM) as file:
            for batch in read_files(settings.filters)(fingerprint.watch(listing.batches(opened))):
                copies.add(batch)
                file.write(batch)
                done += pc.sum(batch.column("size_bytes")).as_py()
                if progress:
                    progress("reading", min(done, code_bytes), code_bytes)
        left_out = over_share(copies.best.values(), settings.per_repo_bytes, settings.seed)
        stages: list[Stage] = [keep_one_copy(copies), cap_repositories(left_out)]
        batches = read_rows(storage.join(spool, "parsed.parquet"))
        for stage in stages:
            batches = stage(batches)
        with _Writer(url, settings.shard_text_bytes) as writer:
            for batch in batches:
                writer.write(batch)
                if progress:
                    progress("writing", writer.bytes_in, done)
    finally:
        storage.remove_tree(spool)
    report = Report(
        out=url,
        settings=config.to_dict(settings),
        sources=tuple(source.name for source in opened),
        listing_sha256=fingerprint.hexdigest(),
        read=writer.read,
        kept=writer.kept,
        dropped=dict(sorted(writer.dropped.items())),
        bytes_in=writer.bytes_in,
        bytes_out=writer.bytes_out,
        languages=dict(sorted(writer.languages.items())),
        licences=dict(sorted(writer.licences.items())),
        shards=tuple(writer.shards),
        dropped_file=writer.dropped_file.entry(),
        output_sha256=f"{writer.content:064x}",
    )
    storage.commit(url, report.manifest())
    return report


class _Writer:
    """The end of the stream: kept rows into shards, dropped ones into dropped.parquet, all of them counted."""

    def __init__(self, url: str, shard_text_bytes: int) -> None:
        self.url, self.shard_text_bytes = url, shard_text_bytes
        self.read = self.kept = self.bytes_in = self.bytes_out = self.content = 0
        self.dropped: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self.licences: Counter[str] = Counter()
        self.shards: list[dict[str, Any]] = []
        self.dropped_file = ParquetOut(url, "dropped.parquet", DROPPED)
        self._shard: ParquetOut | None = None
        self._room_bytes = 0

    def __enter__(self) -> _Writer:
        self.dropped_file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # both are closed, or both discarded, even if one of them fails
            stack.push(self.dropped_file)
            stack.push(self._close_shard)
            if error is not None:
                raise error

    def write(self, batch: Any) -> None:
        """Sort the rows of one STREAM batch into the files."""
        is_kept = pc.equal(batch.column("reason"), "")
        gone = batch.filter(pc.invert(is_kept))
        self.dropped_file.write(gone.select(DROPPED.names))
        self.dropped.update(gone.column("reason").to_pylist())
        kept = batch.filter(is_kept).select(DOCUMENT.names)
        self.read += batch.num_rows
        self.kept += kept.num_rows
        self.bytes_in += pc.sum(batch.column("size_bytes")).as_py()
        if not kept.num_rows:
            return
        if self._shard is None:
            self._shard = ParquetOut(self.url, f"docs-{len(self.shards):05d}.parquet", DOCUMENT).__enter__()
            self._room_bytes = self.shard_text_bytes
        self._shard.write(kept)
        text_bytes = pc.sum(pc.binary_length(kept.column("text"))).as_py()
        self.bytes_out += text_bytes
        self._room_bytes -= text_bytes
        self.languages.update(kept.column("language").to_pylist())
        self.licences.update(kept.column("licence").to_pylist())
        pairs = zip(kept.column("id").to_pylist(), kept.column("sha256").to_pylist(), strict=True)
        self.content = content_sum(pairs, self.content)
        if self._room_bytes <= 0:
            self._close_shard(None, None, None)

    def _close_shard(self, kind: Any, error: Any, trace: Any) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.__exit__(kind, error, trace)
            if error is None:
                self.shards.append(shard.entry())
