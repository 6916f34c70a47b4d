"""One file with many documents as a source: an archive, JSON lines, Parquet, a dump of questions and answers.

A path or any URL that storage reads. A large file is listed in parts, so that several workers can share it: a Parquet
file by row group, JSON lines by bytes, a zip and an uncompressed tar by member. The others are read by one worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from lakh import storage
from lakh.corpus.sources import archives
from lakh.corpus.sources.listing import ListedFile
from lakh.corpus.sources.records import jsonl_parts, row_groups
from lakh.errors import UserError

__all__ = ["ContainerFile", "kind_of"]

KNOWN = "a folder, an archive (tar, zip, whl), .jsonl, .jsonl.gz, .parquet, or Posts.xml"


def kind_of(url: str) -> str:
    """The kind of container by name, or ""."""
    lower = url.lower()
    if archives.kind_of(lower):
        return "archive"
    if lower.endswith((".jsonl", ".jsonl.gz", ".ndjson", ".json.gz", ".jsonl.zst")):
        return "" if lower.endswith(".zst") else "jsonl"
    if lower.endswith(".parquet"):
        return "parquet"
    return "posts" if lower.endswith("posts.xml") else ""


@dataclass(frozen=True)
class ContainerFile:
    url: str
    repo: str
    kind: str
    name: str
    licence: str = ""

    @staticmethod
    def open(url: str, repo: str, *, synthetic: bool = False, licence: str = "") -> ContainerFile:
        kind = kind_of(url)
        if not kind or (synthetic and kind not in ("jsonl", "parquet")):
            raise UserError(url, "is a file of an unknown kind", f"give {KNOWN}")
        return ContainerFile(url, repo, f"synthetic-{kind}" if synthetic else kind, f"{kind}:{repo}", licence)

    def files(self) -> Iterator[ListedFile]:
        with storage.open_read(self.url) as file:
            size = file.seek(0, os.SEEK_END)
        mtime = storage.local_path(self.url).stat().st_mtime_ns if storage.is_local(self.url) else 0
        parts = row_groups(self.url) if self.kind.endswith("parquet") else 1
        if self.kind.endswith("jsonl"):
            parts = jsonl_parts(self.url, size)
        elif self.kind == "archive":
            parts = archives.archive_parts(self.url, size)
        place = (self.repo, self.url.rpartition("/")[2], self.licence, self.name, os.fsencode(self.url))
        for part in range(parts):
            yield ListedFile(*place, size // parts, mtime, kind=self.kind, part=part)
