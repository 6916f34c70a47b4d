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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from lakh import storage
from lakh.errors import CorruptShard

__all__ = [
    "BUCKET",
    "TaskMarker",
    "by_bucket",
    "commit_task",
    "decode",
    "encode",
    "finished_tasks",
    "read_marker",
    "read_section",
    "sections",
    "split_rows",
    "task_name",
    "write_runs",
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


def encode(batches: Sequence[Any]) -> bytes:
    """Record batches of one schema, at least one, as one compressed Arrow stream."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def decode(section: bytes) -> Iterator[Any]:
    with pa.ipc.open_stream(section) as reader:
        yield from reader


class _Run:
    """The run of one port: rows wait by bucket and are written when they exceed SPILL_BYTES."""

    def __init__(self, file: storage.HashingFile) -> None:
        self._file = file
        self._waiting: dict[int, list[Any]] = defaultdict(list)
        self._waiting_bytes = 0
        self.index: dict[str, list[list[int]]] = defaultdict(list)

    def write(self, batch: Any) -> None:
        for bucket, rows in split_rows(batch):
            self._waiting[bucket].append(rows)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes > SPILL_BYTES:
            self.spill()

    def spill(self) -> None:
        for bucket in sorted(self._waiting):
            section = encode(self._waiting[bucket])
            self.index[str(bucket)].append([self._file.size_bytes, len(section), zlib.crc32(section)])
            self._file.write(section)
        self._waiting.clear()
        self._waiting_bytes = 0


def write_runs(folder: str, task: str, output: Iterable[tuple[str, Any]]) -> TaskMarker:
    """Write the output of a task, pairs of port and rows; returns its marker."""
    runs: dict[str, _Run] = {}
    with contextlib.ExitStack() as stack:
        for port, batch in output:
            if batch.num_rows:
                if port not in runs:
                    url = storage.join(folder, f"{task}.{port}.run")
                    runs[port] = _Run(storage.HashingFile(stack.enter_context(storage.create(url))))
                runs[port].write(batch)
        for run in runs.values():
            run.spill()
    return {"runs": {port: {"file": f"{task}.{port}.run", "index": run.index} for port, run in runs.items()}}


def task_name(number: int) -> str:
    return f"task-{number:05d}"


def commit_task(folder: str, number: int, output: Iterable[tuple[str, Any]]) -> TaskMarker:
    """Write the output of a task, then its marker."""
    marker = write_runs(folder, task_name(number), output)
    storage.write_bytes(storage.join(folder, f"{task_name(number)}.json"), json.dumps(marker).encode())
    return marker


def finished_tasks(folder: str) -> set[int]:
    """Tasks with an intact marker."""
    names = [name for name in storage.list_dir(folder) if name.startswith("task-") and name.endswith(".json")]
    return {int(name[5:-5]) for name in names if read_marker(storage.join(folder, name)) is not None}


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
    for section in _sections_of(folder, run, bucket):
        yield from decode(section)


def sections(folder: str, run: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    """(bucket, Arrow stream) of all sections of a run."""
    for bucket in sorted(map(int, run["index"])):
        for section in _sections_of(folder, run, bucket):
            yield bucket, section


def _sections_of(folder: str, run: Mapping[str, Any], bucket: int) -> Iterator[bytes]:
    url = storage.join(folder, run["file"])
    for offset, length, checksum in run["index"].get(str(bucket), ()):
        section = storage.retry(partial(_range, url, offset, length), f"read {url}")
        if len(section) != length or zlib.crc32(section) != checksum:
            raise CorruptShard(
                url, f"bytes {offset} to {offset + length} are damaged", "remove the work folder, build again"
            )
        yield section


def _range(url: str, offset: int, length: int) -> bytes:
    with storage.open_read(url) as file:
        file.seek(offset)
        return file.read(length)
