"""A document: one text with an id, a path and a licence. The schemas and row helpers of the whole package.

Three Arrow schemas, from disk to disk:

    LISTING   files and containers that a source offers, not read yet       sources/ makes it
    STREAM    documents on their way through the filters                    parsing/read_files.py makes it
    DOCUMENT  what a shard of a finished corpus holds                       writer.py writes it

A *filter* is a function from a STREAM record batch to a STREAM record batch with the same rows, so any engine can run
it. A filter never removes a row: it sets `reason` and `detail` and empties the text (`drop`). Dropped rows travel on
to the writer, which is why read = kept + dropped always holds.
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
    "Filter",
    "Progress",
    "complete",
    "document_id",
    "drop",
    "drop_for",
    "one_batch",
    "rows_of",
    "wide",
    "with_columns",
]

Filter = Callable[[Any], Any]
"""pyarrow.RecordBatch -> pyarrow.RecordBatch, both STREAM, with the same rows."""

Progress = Callable[[str, int, int], None]
"""Progress callback: (current activity, bytes or items done, total)."""

ID_HEX_DIGITS = 32  # 128 bits: even among 10**12 documents two equal ids are a one-in-10**14 event

# Every reason for which a document can be missing from a corpus, in the order in which the build checks them.
REASONS = {
    "missing": "a package or repository that its index does not have",
    "licence": "its licence is not accepted (one row for all files of a distribution)",
    "opt-out": "its author asked to have it removed",
    "symlink": "a link that leads out of its folder, or a linked folder",
    "not-code": "the file name has no extension of a collected language",
    "other-language": "in none of filters.languages",
    "vendored": "in a folder for third-party code, and filters.drop_vendored is set",
    "too-large": "larger than filters.max_file_bytes",
    "unreadable": "could not be read",
    "duplicate-path": "another document has the same repository and path",
    "bad-record": "a record of a container that cannot be a document: damaged, or without a text",
    "unsafe-archive": "an archive member that leads out of it, is not a regular file, or unpacks without end",
    "crashed": "its worker process died three times; see --worker-memory",
    "empty": "only whitespace",
    "binary": "contains a NUL byte",
    "bad-encoding": "neither UTF-8 nor UTF-16, and no encoding is declared",
    "long-lines": "a line, or the average line, is too long for hand-written code",
    "generated": "marked as generated, or minified",
    "low-alphanumeric": "too few letters and digits for code",
    "exact-duplicate": "equal to a kept document except for comments and layout",
    "near-duplicate": "almost equal to a kept document",
    "low-quality": "outside its language's limits of syntax errors, comments, strings or numbers",
    "secret": "contains a secret or personal data, and secrets.action is drop",
    "benchmark": "contains a task of an evaluation benchmark",
    "over-repo-share": "its repository already has per_repo_bytes of text",
}

_TYPES = {
    **dict.fromkeys(("size_bytes", "mtime_ns"), pa.int64()),
    **dict.fromkeys(("location", "digest", "bands", "sketch"), pa.binary()),
    **dict.fromkeys(("comment_share", "string_share", "number_share"), pa.float32()),
    "part": pa.int32(),
}


def _schema(names: str) -> Any:
    return pa.schema([(name, _TYPES.get(name, pa.string())) for name in names.split()])


_DOCUMENT = "id repo path language licence source licence_evidence provenance marks text sha256"
# kind: "file" or the kind of container (sources/readers.py); part: of a container that has several
LISTING = _schema("repo path licence source location size_bytes mtime_ns reason detail kind part licence_evidence")
DOCUMENT = _schema(_DOCUMENT)
# digest: of the normalised text; size_bytes: bytes read, 0 if the file was not opened; bands, sketch: similarity keys
# of the text (parsing/text_features.py); dropped_text: text of a dropped document, with settings.dropped_texts;
# secrets: {"kind": count} of redactions as JSON, or ""
STREAM = _schema(
    f"{_DOCUMENT} digest size_bytes reason detail bands sketch comment_share string_share number_share dropped_text "
    "secrets"
)
DROPPED = _schema("id repo path reason detail text")


@dataclass(frozen=True, slots=True)
class Document:
    """One row of a corpus."""

    id: str
    """Stable: depends on repo and path only."""
    repo: str
    path: str
    language: str
    licence: str
    """SPDX-like, "" if unknown."""
    source: str
    licence_evidence: str
    """Where the licence was found: a file, a header, a field of metadata."""
    provenance: str
    """Origin that a record states for itself, as JSON, or ""."""
    marks: str
    """Space-separated tags, such as test."""
    text: str
    sha256: str
    """Of the text as UTF-8."""


def complete(batch: Any) -> Any:
    """Add the missing columns of STREAM to a batch, filled with empty values."""
    arrays = []
    for column in STREAM:
        if column.name in batch.schema.names:
            arrays.append(batch.column(column.name))
        else:
            empty = {pa.string(): "", pa.binary(): b""}.get(column.type, 0)
            arrays.append(pa.repeat(pa.scalar(empty, column.type), batch.num_rows))
    return pa.record_batch(arrays, schema=STREAM)


def document_id(repo: str, path: str) -> str:
    """Same repository and path, same id, whatever the text."""
    return hashlib.sha256(f"{repo}\0{path}".encode()).hexdigest()[:ID_HEX_DIGITS]


def rows_of(batch: Any, *columns: str) -> Iterator[tuple[Any, ...]]:
    """Tuples of the named columns, row by row."""
    return zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def with_columns(batch: Any, **columns: Any) -> Any:
    """The batch with these columns (Arrow arrays or lists) replaced."""
    arrays = [
        pa.array(columns[field.name], field.type)
        if isinstance(columns.get(field.name), list)
        else columns.get(field.name, batch.column(field.name))
        for field in batch.schema
    ]
    return pa.record_batch(arrays, schema=batch.schema)


def one_batch(table: Any) -> Any:
    """A table as a single record batch. Tables of more than 2 GiB need `wide` columns."""
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise AssertionError(f"{table.num_rows:,} rows do not fit into one batch: a column has 32-bit offsets")
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def wide(table: Any) -> Any:
    """The table with 64-bit offsets in its text and binary columns, which may then exceed 2 GiB."""
    wider = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return table.cast(pa.schema([field.with_type(wider.get(field.type, field.type)) for field in table.schema]))


def drop(batch: Any, reasons: Sequence[str], details: Sequence[str]) -> Any:
    """Set reason and detail in the rows of a STREAM batch that have none yet ("" keeps a row); empty their texts."""
    if not any(reasons):
        return batch
    given = pa.array(reasons, pa.string())
    fresh = pc.and_(pc.equal(batch.column("reason"), ""), pc.not_equal(given, ""))
    reason = pc.if_else(fresh, given, batch.column("reason"))
    detail = pc.if_else(fresh, pa.array(details, pa.string()), batch.column("detail"))
    text = pc.if_else(pc.equal(reason, ""), batch.column("text"), "")
    return with_columns(batch, reason=reason, detail=detail, text=text)


def drop_for(batch: Any, reason: str, details: Sequence[str]) -> Any:
    """Drop the rows that have a detail, all for the same reason."""
    return drop(batch, [reason if detail else "" for detail in details], details)
