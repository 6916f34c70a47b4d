"""The plan of a build, made before it starts: settings, the listing, and the listing cut into splits.

A *split* is the unit of work, of resume and of output: a range of the listing, cut at the end of a repository if one is
near. Splits, and therefore shards, depend on the sources and the settings only, never on workers or engines.

    work/plan.json          identity of the plan; written last: a work folder of another plan is cleared
    work/listing.parquet    one row group per split
    work/benchmarks/N/FILE  the benchmarks of decontamination, for workers on other machines

Fails with UserError (two sources with repositories of one name). Memory: one split's listing, and the names of the
repositories.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakh import __version__, config, storage
from lakh.corpus.document import LISTING
from lakh.corpus.filters.benchmark_files import locate_benchmarks
from lakh.corpus.filters.decontaminate import DecontaminationSettings
from lakh.corpus.parsing.read_files import FileFilterSettings, admit
from lakh.corpus.reports.report import CorpusReport
from lakh.corpus.settings import Settings
from lakh.corpus.shards import check_shard, create_shard, read_group
from lakh.corpus.sources import CorpusSource, Fingerprint, batches
from lakh.errors import PeerTimeout, UserError

__all__ = [
    "AlreadyBuilt",
    "CorpusBuildPlan",
    "SourceSurvey",
    "count_buckets",
    "make_build_plan",
    "read_benchmark_files",
    "survey",
]

WORK_FORMAT = 5
"""Changes when files of a work folder change meaning, so that an unfinished build of older code starts again."""
MAX_SPLITS = 2000
SPLITS_PER_BUCKET = 4
"""The keys of this many splits are compared in one task: some tens of MB."""
BUCKET_TEXT_BYTES = 256 << 20
"""At most the keys of this much text are compared in one task (build_size.py states its memory); 10 TB of text are
37,253 buckets."""
MAX_BUCKETS = 1 << 16
MAX_SPLIT_ROWS = 20_000
COMPRESSION_RATIO = 4
"""A compressed container counts as this many times its size: code compresses to about a quarter."""
PLAN, LISTING_FILE, FRESH_LISTING = "plan.json", "listing.parquet", "fresh-listing.parquet"
BENCHMARKS = "benchmarks"
PLAN_TIMEOUT_S = 600.0
"""How long a member of a job array waits for the plan of member 0."""


@dataclass(frozen=True)
class SourceSurvey:
    """What the sources offer, from file names and sizes only."""

    sources: tuple[str, ...]
    listing_sha256: str
    code_bytes: int


@dataclass(frozen=True)
class CorpusBuildPlan:
    settings: Settings
    survey: SourceSurvey
    out: str
    work: str
    num_splits: int
    num_buckets: int
    earlier: tuple[str, ...] = ()
    """Shards of earlier corpora, whose documents must not appear again."""
    resumed: bool = False
    """Whether an earlier process started this build and did not finish it."""
    benchmarks: Mapping[str, str] = field(default_factory=dict)
    """Files of benchmarks in the work folder, with their SHA-256."""

    def listing(self, split: int) -> Iterator[Any]:
        """The LISTING rows of one split."""
        yield from read_group(storage.join(self.work, LISTING_FILE), split)

    @property
    def decontamination(self) -> DecontaminationSettings:
        files = tuple(storage.join(self.work, name) for name in self.benchmarks)
        return replace(self.settings.decontaminate, benchmarks=files)

    def spool_name(self, split: int) -> str:
        return f"spool/split-{split:05d}.parquet"


class AlreadyBuilt(Exception):
    """The other members of a job array have finished the build and removed its work folder."""


def survey(opened: Sequence[CorpusSource], settings: Settings, work: str, member: int = 0) -> SourceSurvey:
    """Walk the sources once without opening a file, and save the listing in the work folder."""
    code_bytes = 0
    owner: dict[str, str] = {}
    fingerprint = Fingerprint()
    # In a job array, only member 0 writes: a late member leaves nothing behind.
    with create_shard(work, FRESH_LISTING, LISTING) if member == 0 else contextlib.nullcontext() as out:
        for batch in fingerprint.watch(batches(opened)):
            for row in batch.to_pylist():
                other = owner.setdefault(row["repo"], row["source"])
                if other != row["source"]:
                    found = f"{other} has a repository of that name too"
                    raise UserError(f"repository {row['repo']}", found, "name the folder: NEWNAME=PATH")
                code_bytes += _weight(row, settings.filters)
            if out is not None:
                out.write(batch)
    return SourceSurvey(tuple(source.name for source in opened), fingerprint.hexdigest(), code_bytes)


def read_benchmark_files(settings: DecontaminationSettings) -> dict[str, bytes]:
    """The benchmarks of a build by their name in the work folder."""
    located = locate_benchmarks(settings.benchmarks)
    return {
        f"{BENCHMARKS}/{number:02d}/{Path(url).name}": storage.read_bytes(url) for number, url in enumerate(located)
    }


def make_build_plan(
    found: SourceSurvey,
    settings: Settings,
    out: str,
    work: str,
    earlier: Sequence[CorpusReport] = (),
    member: int = 0,
    benchmarks: Mapping[str, bytes] | None = None,
) -> CorpusBuildPlan:
    """Cut the listing that `survey` saved into splits; a work folder of the same plan is resumed.

    In a job array only member 0 writes the plan, and decides about the benchmarks; the others wait for it.
    """
    hashed = {name: hashlib.sha256(content).hexdigest() for name, content in (benchmarks or {}).items()}
    hashes = sorted(report.output_sha256 for report in earlier)
    parts = [WORK_FORMAT, __version__, found.listing_sha256, found.sources, config.fingerprint(settings), hashes]
    identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    plan_url, fresh = storage.join(work, PLAN), storage.join(work, FRESH_LISTING)
    old = _read_plan(plan_url) if member == 0 else _await_plan(plan_url, identity, out)
    is_same = old.get("identity") == identity and (member > 0 or old.get("benchmarks") == hashed)
    resumed = member == 0 and is_same
    if not is_same:
        for name in storage.list_dir(work):
            if name not in ("lock", FRESH_LISTING):
                storage.remove_tree(storage.join(work, name))
        num_splits = 0
        with create_shard(work, LISTING_FILE, LISTING) as file:
            for split in _cut(fresh, max(settings.split_bytes, found.code_bytes // MAX_SPLITS), settings.filters):
                file.write(split)
                num_splits += 1
        for name, content in (benchmarks or {}).items():
            storage.write_bytes(storage.join(work, name), content)
        old = {"identity": identity, "num_splits": num_splits, "benchmarks": hashed}
        storage.write_bytes(plan_url, json.dumps(old).encode())
    if member == 0:
        storage.remove_tree(fresh)
    num_splits = int(old["num_splits"])
    shards = tuple(check_shard(report.out, entry) for report in earlier for entry in report.shards)
    num_buckets = count_buckets(num_splits + len(shards), found.code_bytes)
    return CorpusBuildPlan(settings, found, out, work, num_splits, num_buckets, shards, resumed, old["benchmarks"])


def count_buckets(num_splits: int, text_bytes: int) -> int:
    """Into how many buckets the keys of documents are divided, so that a task holds its bucket in memory."""
    return min(MAX_BUCKETS, max(-(-num_splits // SPLITS_PER_BUCKET), -(-text_bytes // BUCKET_TEXT_BYTES)))


def _await_plan(url: str, identity: str, out: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + PLAN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        plan = _read_plan(url)
        if plan.get("identity") == identity:
            return plan
        if storage.is_complete(out):
            raise AlreadyBuilt
        time.sleep(1)
    found = f"part 0 made no plan of these sources and settings within PLAN_TIMEOUT_S = {PLAN_TIMEOUT_S:g} s"
    raise PeerTimeout(url, found, "look at part 0; all parts need the same command and the same files")


def _read_plan(url: str) -> dict[str, Any]:
    try:
        plan = json.loads(storage.read_bytes(url)) if storage.exists(url) else {}
    except ValueError:
        return {}
    return plan if isinstance(plan, dict) else {}


def _cut(fresh: str, split_bytes: int, filters: FileFilterSettings) -> Iterator[Any]:
    rows: list[dict[str, Any]] = []
    size = 0
    for row in _listed_rows(fresh):
        starts_repo = bool(rows) and row["repo"] != rows[-1]["repo"]
        full = size >= split_bytes or len(rows) >= MAX_SPLIT_ROWS
        if full or (starts_repo and (size >= split_bytes // 2 or len(rows) >= MAX_SPLIT_ROWS // 2)):
            yield pa.RecordBatch.from_pylist(rows, schema=LISTING)
            rows, size = [], 0
        rows.append(row)
        size += _weight(row, filters)
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=LISTING)


def _listed_rows(url: str) -> Iterator[dict[str, Any]]:
    with storage.open_read(url) as file:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=4096):
            yield from batch.to_pylist()


def _weight(row: dict[str, Any], filters: FileFilterSettings) -> int:
    """Estimated bytes of text of a listed row."""
    if row["reason"]:
        return 0
    if row["kind"] != "file":
        return int(row["size_bytes"]) * COMPRESSION_RATIO
    return 0 if admit(row["path"], row["size_bytes"], filters)[0] else int(row["size_bytes"])
