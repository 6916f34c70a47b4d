"""A document: one text with an id, a place and a licence. The vocabulary of the whole room.

Three Arrow schemas, from disk to disk:

    LISTING   files and containers that a source offers, not read yet       sources/ makes it
    STREAM    documents on their way through the stages                     parse.py makes it
    DOCUMENT  what a shard of a finished corpus holds                       writer.py writes it

A *stage* is a plain function from an iterator of record batches to another one, so that any engine can run
it. A stage never removes a row: it sets `reason` and `detail` and empties the text (`drop`). Dropped rows
travel on to the writer, which is why read = kept + dropped holds by construction and no stage needs a side
channel.

Knows nothing of files, engines or filters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "DOCUMENT",
    "DROPPED",
    "LISTING",
    "REASONS",
    "STREAM",
    "Document",
    "Progress",
    "Stage",
    "complete",
    "document_id",
    "drop",
]

Stage = Callable[[Iterator[Any]], Iterator[Any]]
"""Iterator[pyarrow.RecordBatch] -> Iterator[pyarrow.RecordBatch]."""

Progress = Callable[[str, int, int], None]
"""Called now and then with (what is going on, bytes done, bytes in all)."""

ID_HEX_DIGITS = 32  # 128 bits: even among 10**12 documents two equal ids are a one-in-10**14 event

# Every reason for which a document can be missing from a corpus, in the order in which they are looked for.
REASONS = {
    "missing": "a package or repository that is not where it should be",
    "licence": "its licence is not one of those that are taken (one row for all files of a distribution)",
    "opt-out": "its author asked to leave it out",
    "symlink": "a link that leads out of its folder, or a linked folder",
    "not-code": "the file name has no extension of a language that is collected",
    "other-language": "in none of filters.languages",
    "vendored": "in a folder for other people's code, and filters.drop_vendored is set",
    "too-large": "larger than filters.max_file_bytes",
    "unreadable": "could not be read",
    "duplicate-path": "another document has the same repository and path",
    "bad-record": "a record of a container that cannot be a document: damaged, or without a text",
    "unsafe-archive": "an archive's member that leads out of it, is no plain file, or unpacks without end",
    "crashed": "whoever worked on it died, three times; see --worker-memory",
    "empty": "nothing but blanks",
    "binary": "holds a NUL byte",
    "bad-encoding": "not UTF-8",
    "long-lines": "a line, or the average line, is too long for hand-written code",
    "generated": "says that it was generated, or is minified",
    "low-alphanumeric": "too few letters and digits for code",
    "exact-duplicate": "equal to a kept document but for comments and layout",
    "near-duplicate": "almost equal to a kept document",
    "low-quality": "outside its language's limits of syntax errors, comments, strings or numbers",
    "secret": "holds a secret or personal data, and secrets.action is drop",
    "benchmark": "holds a task of an evaluation benchmark",
    "over-repo-share": "its repository already has per_repo_bytes of text",
}

_PLACE = [("repo", pa.string()), ("path", pa.string())]
_ORIGIN = [("licence", pa.string()), ("source", pa.string())]
_EVIDENCE = [("licence_evidence", pa.string()), ("provenance", pa.string()), ("marks", pa.string())]
_FATE = [("reason", pa.string()), ("detail", pa.string())]

LISTING = pa.schema(
    [
        *_PLACE,
        *_ORIGIN,
        ("location", pa.binary()),
        ("size_bytes", pa.int64()),
        ("mtime_ns", pa.int64()),
        *_FATE,
        ("kind", pa.string()),  # "file", or what kind of container it is: sources/containers.py
        ("part", pa.int32()),  # which part of a container, for those that have several
        ("licence_evidence", pa.string()),
    ]
)
DOCUMENT = pa.schema(
    [
        ("id", pa.string()),
        *_PLACE,
        ("language", pa.string()),
        *_ORIGIN,
        *_EVIDENCE,
        ("text", pa.string()),
        ("sha256", pa.string()),
    ]
)
# digest: of the normalised text (dedup.py); size_bytes: bytes read from the source, 0 where the file was not
# opened
STREAM = pa.schema(
    [
        *DOCUMENT,
        ("digest", pa.binary()),
        ("size_bytes", pa.int64()),
        *_FATE,
        ("bands", pa.binary()),  # normalise.py: LSH band keys and sketch of the text, "" where it is too short
        ("sketch", pa.binary()),
        ("comment_share", pa.float32()),
        ("string_share", pa.float32()),
        ("number_share", pa.float32()),
        ("dropped_text", pa.string()),  # what a dropped document held, where settings.dropped_texts asks for it
        ("secrets", pa.string()),  # {"kind": number} as JSON, of what was redacted; "" where nothing was
    ]
)
DROPPED = pa.schema([("id", pa.string()), *_PLACE, *_FATE, ("text", pa.string())])


@dataclass(frozen=True, slots=True)
class Document:
    """One row of a corpus."""

    id: str
    """Stable: depends on repo and path alone."""
    repo: str
    path: str
    language: str
    licence: str
    """SPDX-like, or "" where nothing is known."""
    source: str
    licence_evidence: str
    """Where the licence was found: a file, a header, a field of metadata."""
    provenance: str
    """What a record says of its own origin, as JSON; "" where it says nothing."""
    marks: str
    """Blank-separated words, such as test."""
    text: str
    sha256: str
    """Of the text as UTF-8."""


def complete(batch: Any) -> Any:
    """A batch that has some columns of STREAM as one that has them all; those that it lacks are empty."""
    arrays = []
    for column in STREAM:
        if column.name in batch.schema.names:
            arrays.append(batch.column(column.name))
        elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            empty = "" if pa.types.is_string(column.type) else b""
            arrays.append(pa.repeat(pa.scalar(empty, column.type), batch.num_rows))
        else:
            arrays.append(pa.repeat(pa.scalar(0, column.type), batch.num_rows))
    return pa.record_batch(arrays, schema=STREAM)


def document_id(repo: str, path: str) -> str:
    """The same for the same place in the same repository, whatever the text."""
    return hashlib.sha256(f"{repo}\0{path}".encode()).hexdigest()[:ID_HEX_DIGITS]


def drop(batch: Any, reasons: Sequence[str], details: Sequence[str]) -> Any:
    """Set `reasons` in those rows of a STREAM batch that have none yet ("" keeps a row), and empty their texts."""
    if not any(reasons):
        return batch
    names = batch.schema.names
    given = pa.array(reasons, pa.string())
    fresh = pc.and_(pc.equal(batch.column("reason"), ""), pc.not_equal(given, ""))
    columns = dict(zip(names, batch.columns, strict=True))
    columns["reason"] = pc.if_else(fresh, given, columns["reason"])
    columns["detail"] = pc.if_else(fresh, pa.array(details, pa.string()), columns["detail"])
    columns["text"] = pc.if_else(pc.equal(columns["reason"], ""), columns["text"], "")
    return pa.record_batch([columns[name] for name in names], schema=batch.schema)
