"""Parquet files of documents, written with their hash and checked when read.

A shard appears under its name only after it was closed without an error, and its SHA-256 is known without
reading it again. Pages carry checksums, so that a flipped bit is found when it is read. Fails with CorruptShard if a
file does not match its manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakh import storage
from lakh.corpus.document import DOCUMENT
from lakh.errors import CorruptShard, UserError

__all__ = [
    "FORMAT",
    "MADE_BY",
    "REBUILD",
    "ParquetShard",
    "check_shard",
    "create_shard",
    "read_corpus_manifest",
    "read_documents",
    "read_group",
    "read_rows",
]

FORMAT = "lakh-corpus/2"
READABLE = (FORMAT, "lakh-corpus/1")
MADE_BY = "lakh corpus build SRC... --out DIR"
REBUILD = "build the corpus again with: lakh corpus build SRC... --out DIR --force"
REPEATED = ("repo", "language", "licence", "source", "reason")  # few values: stored as a dictionary


class ParquetShard:
    """A Parquet file being written (`create_shard`)."""

    def __init__(self, name: str, file: storage.HashingFile, writer: pq.ParquetWriter) -> None:
        self.name, self._file, self._writer = name, file, writer
        self.rows = 0

    def write(self, batch: Any) -> None:
        if batch.num_rows:
            self._writer.write_batch(batch)
            self.rows += batch.num_rows

    def entry(self) -> dict[str, Any]:
        """The entry of this file in the manifest; valid after it was closed."""
        return {"file": self.name, "rows": self.rows, "bytes": self._file.size_bytes, "sha256": self._file.sha256}


@contextlib.contextmanager
def create_shard(folder: str, name: str, schema: Any) -> Iterator[ParquetShard]:
    """A shard to write to; an exception inside leaves no file."""
    with storage.create(storage.join(folder, name)) as raw:
        file = storage.HashingFile(raw)
        repeated = [column for column in REPEATED if column in schema.names]
        writer = pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True, use_dictionary=repeated)
        try:
            yield ParquetShard(name, file, writer)
        except BaseException:
            with contextlib.suppress(Exception):  # the footer of a discarded file may fail as well
                writer.close()
            raise
        writer.close()


def check_shard(folder: str, entry: Mapping[str, Any], remedy: str = REBUILD) -> str:
    """The URL of a shard, after a check of its presence and size."""
    url = storage.join(folder, entry["file"])
    if not storage.exists(url):
        raise CorruptShard(url, "is missing", remedy)
    with storage.open_read(url) as file:
        size = file.seek(0, 2)
    if size != entry["bytes"]:
        raise CorruptShard(url, f"has {size} bytes, its manifest says {entry['bytes']}", remedy)
    return url


def read_corpus_manifest(url: str) -> dict[str, Any]:
    """The manifest of a finished corpus; fails with the command that builds one if there is none."""
    manifest = storage.read_manifest(url, made_by=MADE_BY)
    if manifest.get("format") not in READABLE:
        found = f"is not a corpus: its format is {manifest.get('format')!r}"
        raise UserError(str(url), found, f"make one with: {MADE_BY}")
    return manifest


def read_documents(url: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The kept documents of a finished corpus as record batches, in the order of the shards."""
    manifest = read_corpus_manifest(url)
    names = list(columns) if columns is not None else DOCUMENT.names
    shards = [(entry, check_shard(str(url), entry)) for entry in manifest["shards"]]  # check all before the first row
    for entry, shard in shards:
        rows = 0
        for batch in read_rows(shard, names):
            rows += batch.num_rows
            yield batch
        if rows != entry["rows"]:
            raise CorruptShard(shard, f"has {rows} documents, its manifest says {entry['rows']}", REBUILD)


def read_rows(url: str, columns: Sequence[str] | None = None, remedy: str = REBUILD) -> Iterator[Any]:
    """The rows of one Parquet file, a row group (a few MB) at a time."""
    with _opened(url, remedy) as parquet:
        wanted = list(columns) if columns else None
        missing = set(wanted or ()) - set(parquet.schema_arrow.names)
        if missing:
            raise CorruptShard(url, f"lacks the column {min(missing)}", remedy)
        for number in range(parquet.num_row_groups):
            yield from parquet.read_row_group(number, columns=wanted).to_batches()


def read_group(url: str, number: int, remedy: str = REBUILD) -> Iterator[Any]:
    """The rows of one row group."""
    with _opened(url, remedy) as parquet:
        yield from parquet.read_row_group(number).to_batches()


@contextlib.contextmanager
def _opened(url: str, remedy: str) -> Iterator[Any]:
    """A Parquet file with checksums verified; errors inside become CorruptShard."""
    with storage.open_read(url) as file:
        try:
            yield pq.ParquetFile(file, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            found = str(error).strip().partition("\n")[0][:200]
            raise CorruptShard(url, f"cannot be read ({found})", remedy) from None
