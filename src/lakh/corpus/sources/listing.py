"""A listing: what sources offer, before any file is opened.

The same tree always gives the same listing, and its fingerprint changes when a file is added, removed or touched. Fails
with UserError on a source that lists nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa

from lakh.corpus.document import LISTING, rows_of
from lakh.errors import UserError

__all__ = ["CorpusSource", "Fingerprint", "ListedFile", "RawDocument", "ReadPredicate", "as_text", "batches"]

BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file of a source, or the reason why it cannot be read; the fields of LISTING in their order."""

    repo: str
    path: str
    licence: str
    source: str
    location: bytes = b""
    """The local path; bytes, because a file name need not be text."""
    size_bytes: int = 0
    mtime_ns: int = 0
    reason: str = ""
    detail: str = ""
    kind: str = "file"
    """A single file, or a kind of container with many documents (readers.py)."""
    part: int = 0
    licence_evidence: str = ""


ReadPredicate = Callable[[str, int], bool]
"""(path, size in bytes) -> whether to read the content."""


@dataclass(slots=True)
class RawDocument:
    """A document before any check: its bytes, or the reason why there are none."""

    repo: str
    path: str
    size_bytes: int = 0
    content: bytes | None = None
    """None if it was not read; `reason`, or its name and size, explain why."""
    licence: str = ""
    licence_evidence: str = ""
    provenance: str = ""
    language: str = ""
    """If the source states it; else it is detected."""
    documentation: bool = False
    reason: str = ""
    detail: str = ""


class CorpusSource(Protocol):
    @property
    def name(self) -> str:
        """The name in reports, the same on every machine."""
        ...

    def files(self) -> Iterator[ListedFile]: ...


def batches(sources: Iterable[CorpusSource]) -> Iterator[Any]:
    """The listings of all sources as record batches. Fails with UserError on a source that lists nothing."""
    for source in sources:
        listed = source.files()
        rows = list(islice(listed, BATCH_ROWS))
        if not rows:
            raise UserError(source.name.removeprefix("folder:"), "holds no files", "choose a folder with source code")
        while rows:
            yield _batch(rows)
            rows = list(islice(listed, BATCH_ROWS))


class Fingerprint:
    """SHA-256 over names, sizes and times of a listing."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def watch(self, listing: Iterable[Any]) -> Iterator[Any]:
        """Pass the batches through and add them to the hash."""
        for batch in listing:
            names = ("repo", "path", "size_bytes", "mtime_ns", "reason", "detail", "kind", "part")
            for row in rows_of(batch, *names):
                self._digest.update(repr(row).encode())
            yield batch

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _batch(rows: Sequence[ListedFile]) -> Any:
    columns = zip(*(astuple(row) for row in rows), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LISTING, strict=True)]
    return pa.record_batch(arrays, schema=LISTING)


def as_text(name: str) -> str:
    """A file name as text; bytes that are not UTF-8 become an escape such as \\udcff."""
    return name.encode("utf-8", "backslashreplace").decode()
