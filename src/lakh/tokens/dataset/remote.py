"""Arrays on an object store, read in blocks and cached on a local disk.

Blocks are fetched by range reads and cached under the shard's hash, so that the ranks of one machine and
later runs share them, and a changed shard never uses an old block. If the cache disk is full, reading continues without
the cache. Raises PeerLost if the store does not answer, and CorruptShard if an object's size, the hash of a block or an
id does not match the manifest. A block is checked when a process reads it for the first time, from the store or from
the cache; token sets packed before 2026-11-17 have no hashes of blocks, and only their ids are checked.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, DiskFull, UserError
from lakh.tokens.dataset.shard_check import ShardFile

__all__ = ["RemoteArray"]

BLOCKS_IN_MEMORY = 16


class RemoteArray:
    """The numbers of one remote file. Supports `array[start:stop]` and `len(array)`."""

    def __init__(self, file: ShardFile, *, block_bytes: int, block_sha256: Sequence[str], cache: str) -> None:
        """`block_sha256`: of each block, or nothing."""
        self._block_bytes = block_bytes
        self.url, self.length, self.dtype = file.url, file.length, np.dtype(file.dtype)
        self._shard, self._block_sha256 = file, block_sha256
        self._checked: set[int] = set()
        self._folder = Path(cache).expanduser() / "tokens" / file.sha256[:2] / file.sha256 if cache else None
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
        per_block = self._block_bytes // self.dtype.itemsize
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
        first = number * self._block_bytes
        size = min(self._block_bytes, self.length * self.dtype.itemsize - first)
        cached = self._folder / f"{number:06d}-{self._block_bytes}" if self._folder else None
        if cached is not None:
            with contextlib.suppress(OSError):  # not cached yet, or unreadable
                raw = cached.read_bytes()
                with contextlib.suppress(CorruptShard):  # a damaged cache: fetch the block again
                    if len(raw) == size:
                        return self._check(number, raw)
        raw = storage.retry(lambda: self._fetch(first, size), f"read {self.url}")
        block = self._check(number, raw)
        if cached is not None:
            try:
                storage.write_bytes(cached, raw)
            except (DiskFull, UserError, OSError):
                self._folder = None  # the cache is not writable: continue without it
        return block

    def _check(self, number: int, raw: bytes) -> np.ndarray:
        """The numbers of a block. Raises CorruptShard if they are damaged."""
        block = np.frombuffer(raw, self.dtype)
        if number in self._checked:
            return block
        if self._block_sha256 and hashlib.sha256(raw).hexdigest() != self._block_sha256[number]:
            first = number * self._block_bytes
            raise self._shard.damaged(f"bytes {first:,} to {first + len(raw) - 1:,} do not match its manifest")
        self._shard.check_limit(int(block.max()))
        self._checked.add(number)
        return block

    def _fetch(self, first: int, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = storage.open_read(self.url)
                total = self._file.seek(0, 2)
                if total != self.length * self.dtype.itemsize:
                    found = f"has {total} bytes, its manifest says {self.length * self.dtype.itemsize}"
                    raise self._shard.damaged(found)
            self._file.seek(first)
            raw = self._file.read(size)
        except UserError:
            raise self._shard.damaged("is missing") from None
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
