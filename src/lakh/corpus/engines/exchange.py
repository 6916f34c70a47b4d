"""The keyed exchange on disk: all rows of one bucket come together.

A task of a step writes one *run* per port: the rows for bucket 0, then those for bucket 1, and so on, each as one
Arrow stream. The run's index (bucket -> offset, length, checksum) is in the task's marker, which is written last; so a
run is either complete or ignored, and a reader of a bucket reads one byte range of each run.

    STEP/task-00012.PORT.run     sections of Arrow, by bucket
    STEP/task-00012.json         the marker: indexes of all ports

Arrow streams and not Parquet: a section is written once, read once, and needs no footer; the range read is a single
request on an object store.

Memory: one task's rows of one port, spilled to its run when they exceed SPILL_BYTES (a bucket then has several
sections). Fails with CorruptShard if a section does not match its marker.
"""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from lakh import storage
from lakh.errors import CorruptShard

__all__ = [
    "BUCKET",
    "ShuffleWriter",
    "TaskMarker",
    "by_bucket",
    "decode",
    "encode",
    "read_marker",
    "read_section",
    "split_rows",
]

BUCKET = "bucket"
"""The column with the next bucket of a row; it is not written."""
SPILL_BYTES = 32 << 20
TaskMarker = dict[str, Any]


def by_bucket(keys: Any, num_buckets: int) -> Any:
    """The bucket of each key of a column, a function of the key's bytes."""
    if num_buckets == 1:
        return np.zeros(len(keys), dtype=np.int32)
    if pa.types.is_integer(keys.type):  # already a hash
        return (np.asarray(keys).astype(np.uint64) % np.uint64(num_buckets)).astype(np.int32)
    # crc32 runs at memory speed and is the same everywhere, unlike Python's hash.
    return np.fromiter(
        (zlib.crc32(key) % num_buckets for key in keys.cast(pa.binary()).to_pylist()), np.int32, count=len(keys)
    )


def split_rows(batch: Any) -> Iterator[tuple[int, Any]]:
    """(bucket, its rows) of a batch with a BUCKET column, in ascending order; rows keep their order."""
    buckets = batch.column(BUCKET).to_numpy(zero_copy_only=False)
    rows = batch.drop_columns([BUCKET])
    order = np.argsort(buckets, kind="stable")
    found, starts = np.unique(buckets[order], return_index=True)
    for number, start, end in zip(found, starts, [*starts[1:], len(order)], strict=True):
        yield int(number), rows.take(pa.array(order[start:end]))


def encode(batches: Iterable[Any]) -> bytes:
    """Record batches of one schema as one compressed Arrow stream."""
    sink = io.BytesIO()
    writer = None
    for batch in batches:
        if writer is None:
            writer = pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
    return sink.getvalue()


def decode(section: bytes) -> Iterator[Any]:
    if section:
        with pa.ipc.open_stream(section) as reader:
            yield from reader


class ShuffleWriter:
    """The output of one task, by port; `marker()` closes it."""

    def __init__(self, folder: str, task: str) -> None:
        self.folder, self.task = folder, task
        self._stack = contextlib.ExitStack()
        self._files: dict[str, storage.HashingFile] = {}
        self._waiting: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._waiting_bytes: dict[str, int] = defaultdict(int)
        self._index: dict[str, dict[str, list[list[int]]]] = defaultdict(lambda: defaultdict(list))
        self.rows: dict[str, int] = defaultdict(int)

    def __enter__(self) -> ShuffleWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, port: str, batch: Any) -> None:
        if not batch.num_rows:
            return
        for bucket, rows in split_rows(batch):
            self._waiting[port][bucket].append(rows)
        self.rows[port] += batch.num_rows
        self._waiting_bytes[port] += batch.nbytes
        if self._waiting_bytes[port] > SPILL_BYTES:
            self._spill(port)

    def marker(self) -> TaskMarker:
        """Write the remaining rows, commit the runs, and return their index."""
        for port in list(self._waiting):
            self._spill(port)
        self._stack.close()
        self._stack = contextlib.ExitStack()
        return {
            "rows": dict(self.rows),
            "runs": {
                port: {"file": self._file_name(port), "index": dict(index)} for port, index in self._index.items()
            },
        }

    def _file_name(self, port: str) -> str:
        return f"{self.task}.{port}.run"

    def _spill(self, port: str) -> None:
        if port not in self._files:
            url = storage.join(self.folder, self._file_name(port))
            self._files[port] = storage.HashingFile(self._stack.enter_context(storage.create(url)))
        file = self._files[port]
        for bucket in sorted(self._waiting[port]):
            section = encode(self._waiting[port][bucket])
            self._index[port][str(bucket)].append([file.size_bytes, len(section), zlib.crc32(section)])
            file.write(section)
        del self._waiting[port]
        self._waiting_bytes[port] = 0


def read_marker(url: str) -> TaskMarker | None:
    """The marker of a finished task; None if it is missing or damaged, so that the task runs again."""
    if not storage.exists(url):
        return None
    try:
        marker = json.loads(storage.read_bytes(url))
    except ValueError:
        return None
    return marker if isinstance(marker, dict) and "runs" in marker else None


def read_section(folder: str, run: Mapping[str, Any], bucket: int) -> Iterator[Any]:
    """The rows of one bucket in one run."""
    url = storage.join(folder, run["file"])
    for offset, length, checksum in run["index"].get(str(bucket), ()):
        section = storage.retry(partial(_range, url, offset, length), f"read {url}")
        if len(section) != length or zlib.crc32(section) != checksum:
            raise CorruptShard(
                url, f"bytes {offset} to {offset + length} are damaged", "remove the work folder, build again"
            )
        yield from decode(section)


def _range(url: str, offset: int, length: int) -> bytes:
    with storage.open_read(url) as file:
        file.seek(offset)
        return file.read(length)
