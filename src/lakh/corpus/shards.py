"""Parquet files of documents: written in one go with their hash, read back with suspicion.

A `ParquetOut` appears under its name only when it was closed well, and knows its SHA-256 without reading it
again. Pages carry checksums, so that a flipped bit is found when it is read, not when a model has learnt it.

Knows schemas and bytes; knows nothing of stages. Fails with CorruptShard where a file is not what its
manifest says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakh import storage
from lakh.corpus.document import DOCUMENT
from lakh.errors import CorruptShard, UserError

__all__ = [
    "FORMAT",
    "MADE_BY",
    "READABLE",
    "ParquetShard",
    "check_shard",
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
    """One Parquet file on its way to disk. Use as a context manager; an exception inside leaves no file."""

    def __init__(self, folder: str, name: str, schema: Any) -> None:
        self.folder, self.name, self.schema = folder, name, schema
        self.rows = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ParquetShard:
        with self._stack as stack:  # unwinds what was entered if a later line fails
            file = stack.enter_context(storage.create(storage.join(self.folder, self.name)))
            self.file = storage.HashingFile(file)
            repeated = [name for name in REPEATED if name in self.schema.names]
            self._writer = pq.ParquetWriter(
                self.file, self.schema, compression="zstd", write_page_checksum=True, use_dictionary=repeated
            )
            stack.push(self._close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._writer.close()
        else:  # the footer of a file that nobody will see may fail as well
            with contextlib.suppress(Exception):
                self._writer.close()

    def write(self, batch: Any) -> None:
        if batch.num_rows:
            self._writer.write_batch(batch)
            self.rows += batch.num_rows

    def entry(self) -> dict[str, Any]:
        """What the manifest says of this file; valid after it was closed."""
        return {
            "file": self.name,
            "rows": self.rows,
            "bytes": self.file.size_bytes,
            "sha256": self.file.sha256,
        }


def check_shard(folder: str, entry: Mapping[str, Any], remedy: str = REBUILD) -> str:
    """The URL of a shard, after a cheap look: is it there and of the right size?"""
    url = storage.join(folder, entry["file"])
    if not storage.exists(url):
        raise CorruptShard(url, "is missing", remedy)
    with storage.open_read(url) as file:
        size = file.seek(0, 2)
    if size != entry["bytes"]:
        raise CorruptShard(url, f"has {size} bytes, its manifest says {entry['bytes']}", remedy)
    return url


def read_documents(url: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The kept documents of a finished corpus as record batches, in the order of the shards."""
    manifest = storage.read_manifest(url, made_by=MADE_BY)
    if manifest.get("format") not in READABLE:
        raise UserError(
            str(url), f"is no corpus: its format is {manifest.get('format')!r}", f"make one with: {MADE_BY}"
        )
    names = list(columns) if columns is not None else DOCUMENT.names
    shards = [(entry, check_shard(str(url), entry)) for entry in manifest["shards"]]  # all, before the first row
    for entry, shard in shards:
        rows = 0
        for batch in read_rows(shard, names):
            rows += batch.num_rows
            yield batch
        if rows != entry["rows"]:
            raise CorruptShard(shard, f"has {rows} documents, its manifest says {entry['rows']}", REBUILD)


def read_rows(url: str, columns: Sequence[str] | None = None, remedy: str = REBUILD) -> Iterator[Any]:
    """The rows of one Parquet file, a row group at a time; damage is a CorruptShard."""
    with storage.open_read(url) as file:
        try:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            wanted = list(columns) if columns else None
            missing = set(wanted or ()) - set(parquet.schema_arrow.names)
            if missing:
                raise CorruptShard(url, f"lacks the column {min(missing)}", remedy)
            for number in range(parquet.num_row_groups):  # one at a time: writers keep them to a few MB
                yield from parquet.read_row_group(number, columns=wanted).to_batches()
        except (pa.ArrowException, OSError) as error:
            raise CorruptShard(url, f"cannot be read ({_first_line(error)})", remedy) from None


def read_group(url: str, number: int, remedy: str = REBUILD) -> Iterator[Any]:
    """The rows of one row group."""
    with storage.open_read(url) as file:
        try:
            yield from pq.ParquetFile(file, page_checksum_verification=True).read_row_group(number).to_batches()
        except (pa.ArrowException, OSError) as error:
            raise CorruptShard(url, f"cannot be read ({_first_line(error)})", remedy) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
