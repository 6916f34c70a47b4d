"""Arrays on an object store, read in blocks and cached on a local disk.

Blocks of BLOCK_BYTES are fetched by range reads and cached under the shard's hash, so that the ranks of one machine and
later runs share them, and a changed shard never uses an old block. If the cache disk is full, reading continues without
the cache. Raises PeerLost if the store does not answer, and CorruptShard if an object's size differs from its manifest.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, DiskFull, UserError

__all__ = ["RemoteArray"]

BLOCK_BYTES = 4 << 20
BLOCKS_IN_MEMORY = 16


class RemoteArray:
    """The numbers of one remote file. Supports `array[start:stop]` and `len(array)`."""

    def __init__(self, url: str, length: int, dtype: str, *, sha256: str, cache: str, remedy: str) -> None:
        self.url, self.length, self.dtype = url, length, np.dtype(dtype)
        self._remedy = remedy
        self._folder = Path(cache).expanduser() / "tokens" / sha256[:2] / sha256 if cache else None
        self._block = functools.lru_cache(BLOCKS_IN_MEMORY)(self._read)
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self.fetched_bytes = 0
        """Bytes fetched over the network so far."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(self.length)
        assert step == 1
        per_block = BLOCK_BYTES // self.dtype.itemsize
        parts = []
        while start < stop:
            number, offset = divmod(start, per_block)
            count = min(stop - start, per_block - offset)
            with self._lock:
                block = self._block(number)
            parts.append(block[offset : offset + count])
            start += count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def _read(self, number: int) -> np.ndarray:
        first = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.length * self.dtype.itemsize - first)
        cached = self._folder / f"{number:06d}-{BLOCK_BYTES}" if self._folder else None
        if cached is not None:
            with contextlib.suppress(OSError):  # not cached yet, or unreadable
                raw = cached.read_bytes()
                if len(raw) == size:
                    return np.frombuffer(raw, self.dtype)
        raw = storage.retry(lambda: self._fetch(first, size), f"read {self.url}")
        if cached is not None:
            try:
                storage.write_bytes(cached, raw)
            except (DiskFull, UserError, OSError):
                self._folder = None  # the cache is not writable: continue without it
        return np.frombuffer(raw, self.dtype)

    def _fetch(self, first: int, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = storage.open_read(self.url)
                total = self._file.seek(0, 2)
                if total != self.length * self.dtype.itemsize:
                    found = f"has {total} bytes, its manifest says {self.length * self.dtype.itemsize}"
                    raise CorruptShard(self.url, found, self._remedy)
            self._file.seek(first)
            raw = self._file.read(size)
        except UserError:
            raise CorruptShard(self.url, "is missing", self._remedy) from None
        except CorruptShard:
            raise
        except Exception:
            self._file = None  # a broken connection: the next attempt reopens it
            raise
        if len(raw) != size:
            self._file = None
            raise OSError(f"{len(raw)} bytes were received instead of {size}")
        self.fetched_bytes += size
        return bytes(raw)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("open a remote array in the process that reads it")
