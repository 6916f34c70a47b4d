"""What a build is going to do, settled before it starts: settings, the listing, and the listing cut into splits.

A *split* is the unit of work, of resume and of output: a stretch of the listing, cut where a repository ends if that is
near. Splits depend on the sources and the settings alone, never on workers or engines, and so do the shards.

    work/plan.json          what this is the plan of; written last: a work folder of another plan is cleared
    work/listing.parquet    one row group per split

Fails with UserError (two sources with repositories of one name). Memory: one split's listing, and the names of the
repositories.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakh import __version__, config, storage
from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.document import LISTING
from lakh.corpus.filters.decontaminate import DecontaminationSettings
from lakh.corpus.filters.licence import LicenceSettings
from lakh.corpus.filters.quality import QualitySettings
from lakh.corpus.parsing.read_files import FileFilterSettings, admit
from lakh.corpus.reports.report import CorpusReport
from lakh.corpus.secrets import SecretSettings
from lakh.corpus.shards import ParquetShard, check_shard, read_group
from lakh.corpus.sources import CorpusSource, Fingerprint, batches
from lakh.errors import ConfigError, PeerTimeout, UserError

__all__ = ["AlreadyBuilt", "CorpusBuildPlan", "Settings", "SourceSurvey", "make_build_plan", "survey"]

MAX_SPLITS = 2000
MAX_BUCKETS = 256
SPLITS_PER_BUCKET = 4
"""The keys of so many splits are compared in one task: some tens of MB."""
MAX_SPLIT_ROWS = 20_000
UNPACKED = 4
"""A compressed container counts as so many times its size: code packs to about a quarter."""
PLAN, LISTING_FILE, FRESH_LISTING = "plan.json", "listing.parquet", "fresh-listing.parquet"
PLAN_TIMEOUT_S = 600.0
"""How long a member of an array waits for the first one's plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything, besides the sources, that decides what a corpus holds."""

    filters: FileFilterSettings = field(default_factory=FileFilterSettings)
    licences: LicenceSettings = field(default_factory=LicenceSettings)
    near: NearDedupSettings = field(default_factory=NearDedupSettings)
    quality: QualitySettings = field(default_factory=QualitySettings)
    secrets: SecretSettings = field(default_factory=SecretSettings)
    decontaminate: DecontaminationSettings = field(default_factory=DecontaminationSettings)
    per_repo_bytes: int = 0
    """Bytes of text that one repository may give; 0 sets no limit."""
    seed: int = 0
    """Decides which files of a repository are taken when it has more than its share."""
    dropped_texts: bool = False
    """Also write the texts of dropped documents, as far as they were read, beside their reasons."""
    split_bytes: int = 16_000_000
    """Source bytes in one split: the unit of work and of resume; each split gives at most one shard."""

    def __post_init__(self) -> None:
        config.require_positive(self, "split_bytes")
        if self.per_repo_bytes < 0:
            raise ConfigError("per_repo_bytes", f"{self.per_repo_bytes} is negative", "use 0 for no limit")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", f"{self.seed} is out of range", "choose 0 up to 2**63 - 1")


@dataclass(frozen=True)
class SourceSurvey:
    """What the sources offer, by their names alone."""

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
    """Shards of earlier corpora, whose documents are not to come again."""
    resumed: bool = False
    """Whether another process has begun this build before, and did not end it."""

    def listing(self, split: int) -> Iterator[Any]:
        """The LISTING rows of one split."""
        yield from read_group(storage.join(self.work, LISTING_FILE), split)

    def spool_name(self, split: int) -> str:
        return f"spool/split-{split:05d}.parquet"


def survey(opened: Sequence[CorpusSource], settings: Settings, work: str, member: int = 0) -> SourceSurvey:
    """Walk the sources once without opening a file, and put the listing aside: are they there, did they change?"""
    code_bytes = 0
    owner: dict[str, str] = {}
    fingerprint = Fingerprint()
    with ParquetShard(work, FRESH_LISTING, LISTING) if member == 0 else contextlib.nullcontext() as out:
        for batch in fingerprint.watch(batches(opened)):
            for row in batch.to_pylist():
                other = owner.setdefault(row["repo"], row["source"])
                if other != row["source"]:
                    found = f"{other} has a repository of that name too"
                    raise UserError(f"repository {row['repo']}", found, "name the folder: NEWNAME=PATH")
                code_bytes += _weight(row, settings.filters)
            if (
                out is not None
            ):  # of an array, part 0 makes the plan: the others leave nothing behind when they come late
                out.write(batch)
    return SourceSurvey(tuple(source.name for source in opened), fingerprint.hexdigest(), code_bytes)


class AlreadyBuilt(Exception):
    """The other members of an array have ended the build and removed its work, and this one had no part in the rest."""


def make_build_plan(
    found: SourceSurvey, settings: Settings, out: str, work: str, earlier: Sequence[CorpusReport] = (), member: int = 0
) -> CorpusBuildPlan:
    """Cut the listing that `survey` put aside into splits; a work folder of the same plan is taken up again.

    Of an array only the first member (0) writes the plan; the others wait for it.
    """
    identity = hashlib.sha256(
        json.dumps(
            [
                __version__,
                found.listing_sha256,
                found.sources,
                config.fingerprint(settings),
                sorted(report.output_sha256 for report in earlier),
            ]
        ).encode()
    ).hexdigest()
    plan_url, fresh = storage.join(work, PLAN), storage.join(work, FRESH_LISTING)
    old = _read_plan(plan_url) if member == 0 else _await_plan(plan_url, identity, out)
    resumed = member == 0 and old.get("identity") == identity
    if old.get("identity") != identity:
        for name in storage.list_dir(work):
            if name not in ("lock", FRESH_LISTING):
                storage.remove_tree(storage.join(work, name))
        num_splits = 0
        with ParquetShard(work, LISTING_FILE, LISTING) as file:
            for split in _cut(fresh, max(settings.split_bytes, found.code_bytes // MAX_SPLITS), settings.filters):
                file.write(split)
                num_splits += 1
        old = {"identity": identity, "num_splits": num_splits}
        storage.write_bytes(plan_url, json.dumps(old).encode())
    if member == 0:
        storage.remove_tree(fresh)
    num_splits = int(old["num_splits"])
    shards = tuple(check_shard(report.out, entry) for report in earlier for entry in report.shards)
    num_buckets = min(MAX_BUCKETS, -(-(num_splits + len(shards)) // SPLITS_PER_BUCKET))
    return CorpusBuildPlan(settings, found, out, work, num_splits, num_buckets, shards, resumed)


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
    if not storage.exists(url):
        return {}
    try:
        plan = json.loads(storage.read_bytes(url))
    except ValueError:
        return {}
    return plan if isinstance(plan, dict) else {}


def _cut(fresh: str, split_bytes: int, filters: FileFilterSettings) -> Iterator[Any]:
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in _rows_of(fresh):
        for row in batch.to_pylist():
            starts_repo = bool(rows) and row["repo"] != rows[-1]["repo"]
            full = size >= split_bytes or len(rows) >= MAX_SPLIT_ROWS
            if full or (starts_repo and (size >= split_bytes // 2 or len(rows) >= MAX_SPLIT_ROWS // 2)):
                yield pa.RecordBatch.from_pylist(rows, schema=LISTING)
                rows, size = [], 0
            rows.append(row)
            size += _weight(row, filters)
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=LISTING)


def _rows_of(url: str) -> Iterator[Any]:
    with storage.open_read(url) as file:
        yield from pq.ParquetFile(file).iter_batches(batch_size=4096)


def _weight(row: dict[str, Any], filters: FileFilterSettings) -> int:
    """Bytes of work that a listed row stands for."""
    if row["reason"]:
        return 0
    if row["kind"] != "file":
        return int(row["size_bytes"]) * UNPACKED
    return 0 if admit(row["path"], row["size_bytes"], filters)[0] else int(row["size_bytes"])
