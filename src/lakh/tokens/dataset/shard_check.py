"""Verify local token shards once per machine, and notice later changes.

The first process that opens a shard hashes it and leaves a record in this user's cache, under the file's identity
(device, inode, size, times). Later processes find the record and read nothing; processes that open a shard at the same
time wait for the one that hashes it. The same pass finds the largest number, so that ids beyond the vocabulary are
found before a model sees them. Costs one read of the data set per machine, spread over the cores.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard

__all__ = ["FileIdentity", "ShardFile", "check_unchanged", "identity_of", "scan", "verify_files"]

BLOCK_BYTES = 8 << 20
LOCK_TIMEOUT_S = 600.0  # then hash the shard here too: the other process may be stopped
LOCK_POLL_S = 0.05
RECORDS = "verified-shards"

FileIdentity = tuple[int, ...]
"""Inode, size and time of the last change of the content."""


@dataclass(frozen=True)
class ShardFile:
    """One file of a token set: `length` unsigned numbers below `limit`."""

    url: str
    length: int
    dtype: str
    sha256: str
    limit: int
    ascends: bool
    """The numbers are starts of documents, which ascend from 0; else they are token ids."""
    remedy: str

    @property
    def size_bytes(self) -> int:
        return self.length * np.dtype(self.dtype).itemsize

    def check_limit(self, maximum: int) -> None:
        if maximum >= self.limit:
            what, of = ("a start", "tokens") if self.ascends else ("the id", "ids in the vocabulary")
            raise self.damaged(f"holds {what} {maximum:,}, and there are {self.limit:,} {of}")

    def damaged(self, found: str) -> CorruptShard:
        return CorruptShard(self.url, found, self.remedy)


def verify_files(files: Sequence[ShardFile]) -> None:
    """Check local files that are not verified on this machine yet. Raises CorruptShard."""
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))), thread_name_prefix="lakh-verify") as threads:
        for file, maximum in zip(files, threads.map(_verified_maximum, files), strict=True):
            file.check_limit(maximum)


def scan(file: ShardFile, blocks: Iterable[bytes]) -> int:
    """The largest number in the blocks of a file. Raises CorruptShard unless their hash and order are right."""
    digest, maximum, last = hashlib.sha256(), 0, -1
    is_ascending = True
    for block in blocks:
        digest.update(block)
        numbers = np.frombuffer(block, file.dtype)
        maximum = max(maximum, int(numbers.max()))
        if file.ascends:
            first = int(numbers[0])
            is_ascending &= first == 0 if last < 0 else first > last
            is_ascending &= bool((numbers[1:] > numbers[:-1]).all())
            last = int(numbers[-1])
    if digest.hexdigest() != file.sha256:
        raise file.damaged("its bytes do not match its manifest")
    if not is_ascending:
        raise file.damaged("does not hold ascending starts of documents")
    return maximum


def identity_of(path: Path) -> FileIdentity:
    found = path.stat()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def check_unchanged(path: Path, before: FileIdentity) -> None:
    """Raise CorruptShard if the file was deleted or replaced, or its content was changed."""
    todo = "stop whatever writes there, restore the file, then: lakh resume"
    try:
        now = identity_of(path)
    except FileNotFoundError:
        raise CorruptShard(str(path), "was deleted while it is in use", todo) from None
    if now != before:
        raise CorruptShard(str(path), "was overwritten while it is in use", todo)


def _verified_maximum(file: ShardFile) -> int:
    """The largest number of a file, from its record or from reading it."""
    with _record_of(file) as record:
        if record is not None:
            record.seek(0)
            with contextlib.suppress(ValueError, TypeError, KeyError):  # empty, or a writer was killed
                return int(json.loads(record.read())["maximum"])
        maximum = scan(file, _blocks(Path(file.url)))
        if record is not None:
            with contextlib.suppress(OSError):  # a full disk: the next process reads the shard again
                record.seek(0)
                record.truncate()
                record.write(json.dumps({"maximum": maximum}).encode())
                record.flush()
        return maximum


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as raw:
        while block := raw.read(BLOCK_BYTES):
            yield block


@contextlib.contextmanager
def _record_of(file: ShardFile) -> Iterator[IO[bytes] | None]:
    """The locked record of a file; None where the cache cannot be written."""
    shard = Path(file.url)
    found = shard.stat()
    identity = [
        str(shard.resolve()),
        *(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns),
        file.sha256,
        file.ascends,
    ]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    path = storage.cache_folder(RECORDS) / name[:2] / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = path.open("a+b")
    except OSError:
        yield None
        return
    with record:
        yield record if _lock(record) else None


def _lock(record: IO[bytes]) -> bool:
    """Lock a record; it is released when the record is closed. False if another process holds it for too long."""
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < give_up_s:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_POLL_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True
    return False
