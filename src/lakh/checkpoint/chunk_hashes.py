"""Hash a file in chunks: while it is written, and when it is verified.

Chunks are hashed by a few threads beside the writing or reading thread (hashlib releases the GIL), so that hashing
costs little time where there are free cores. Costs no memory while writing: the chunks are views of the tensors.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from lakh import storage
from lakh.checkpoint.format import CHUNK_BYTES, StoredFile

__all__ = [
    "HASH_THREADS",
    "ChunkHashingFile",
    "StoredChunk",
    "chunks_of",
    "coding_threads",
    "find_damage",
    "hash_content",
]

HASH_THREADS = 2  # more would take cores from the training that continues beside a save
CODING_SHARE = 0.5  # of the cores of this rank

StoredChunk = tuple[str, int, int, str]
"""The file name, start, size and SHA-256 of one chunk."""


def coding_threads() -> int:
    """Threads that encode or decode slices: half of the cores that each rank of this machine has, at least two."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(HASH_THREADS, int(CODING_SHARE * len(os.sched_getaffinity(0)) / ranks))


class ChunkHashingFile(io.RawIOBase):
    """A binary file to write to that hashes its chunks. Does not close the file that it writes to.

    The buffers must stay unchanged until `finish`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._chunk_bytes = file, CHUNK_BYTES
        self._threads = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="lakh-hash")
        self._hashes: list[Future[str]] = []
        self._chunk: list[memoryview] = []
        self._free = self._chunk_bytes
        self._size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):  # the hashing starts before the writing
            part = view[at : at + self._free]
            self._chunk.append(part)
            self._free -= len(part)
            at += len(part)
            if not self._free:
                self._end_chunk()
        self._file.write(view)
        self._size_bytes += len(view)
        return len(view)

    def finish(self) -> StoredFile:
        """Wait for the hashes."""
        if self._chunk or not self._hashes:
            self._end_chunk()
        with self._threads:
            return StoredFile(self._size_bytes, tuple(found.result() for found in self._hashes), self._chunk_bytes)

    def abandon(self) -> None:
        """End the threads of a file that is not finished."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_chunk(self) -> None:
        self._hashes.append(self._threads.submit(_sha256, self._chunk))
        self._chunk, self._free = [], self._chunk_bytes

    def writable(self) -> bool:
        return True


def hash_content(content: bytes) -> StoredFile:
    """The entry of a small file."""
    chunks = [memoryview(content)[at : at + CHUNK_BYTES] for at in range(0, max(1, len(content)), CHUNK_BYTES)]
    return StoredFile(len(content), tuple(_sha256([chunk]) for chunk in chunks), CHUNK_BYTES)


def chunks_of(name: str, file: StoredFile) -> list[StoredChunk]:
    starts = range(0, max(1, file.bytes), file.chunk_bytes)
    return [
        (name, start, min(file.chunk_bytes, file.bytes - start), expected)
        for start, expected in zip(starts, file.sha256, strict=True)
    ]


def find_damage(folder: str, chunks: Sequence[StoredChunk]) -> StoredChunk | None:
    """The first chunk that does not match its hash, or None. Reads the chunks with a few threads."""
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="lakh-verify") as threads:
        for chunk, matches in zip(chunks, threads.map(lambda chunk: _matches(folder, chunk), chunks), strict=True):
            if not matches:
                threads.shutdown(wait=False, cancel_futures=True)
                return chunk
    return None


def _matches(folder: str, chunk: StoredChunk) -> bool:
    """Read in blocks: a checkpoint of format 1 is one chunk per file."""
    name, start, size, expected = chunk
    digest, url = hashlib.sha256(), storage.join(folder, name)
    for at in range(start, start + size, CHUNK_BYTES):
        digest.update(storage.read_range(url, at, min(CHUNK_BYTES, start + size - at)))
    return digest.hexdigest() == expected


def _sha256(views: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.hexdigest()
