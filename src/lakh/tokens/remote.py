"""Arrays that lie on another machine, read in pieces and kept on a local disk.

A shard of an object store is fetched in pieces of PIECE_BYTES by range reads. Pieces are kept under a folder as files
named after the shard's hash, so that ranks of one machine share them, a new run finds them again, and a shard that
changed never meets an old piece. A full disk only costs the cache: reading goes on without it.

Knows bytes and numbers; knows nothing of documents. Fails with PeerLost when the store does not answer after the
retries of `storage`, and with CorruptShard when an object has another size than its manifest says.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, DiskFull, UserError

__all__ = ["RemoteArray"]

PIECE_BYTES = 4 << 20
PIECES_IN_MEMORY = 16


class RemoteArray:
    """The numbers of one remote file. `array[start:stop]` and `len(array)` are all that it can do."""

    def __init__(self, url: str, length: int, dtype: str, *, sha256: str, cache: str, remedy: str) -> None:
        self.url, self.length, self.dtype = url, length, np.dtype(dtype)
        self._sha256, self._remedy = sha256, remedy
        self._folder = Path(cache).expanduser() / "tokens" / sha256[:2] / sha256 if cache else None
        self._memory: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self.fetched_bytes = 0
        """Bytes that came over the network so far."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(self.length)
        assert step == 1
        per_piece = PIECE_BYTES // self.dtype.itemsize
        parts = []
        while start < stop:
            number, offset = divmod(start, per_piece)
            taken = min(stop - start, per_piece - offset)
            parts.append(self._piece(number)[offset : offset + taken])
            start += taken
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def _piece(self, number: int) -> np.ndarray:
        with self._lock:
            found = self._memory.get(number)
            if found is None:
                found = np.frombuffer(self._read(number), self.dtype)
                self._memory[number] = found
                if len(self._memory) > PIECES_IN_MEMORY:
                    self._memory.popitem(last=False)
            self._memory.move_to_end(number)
            return found

    def _read(self, number: int) -> bytes:
        first = number * PIECE_BYTES
        size = min(PIECE_BYTES, self.length * self.dtype.itemsize - first)
        kept = self._folder / f"{number:06d}-{PIECE_BYTES}" if self._folder else None
        if kept is not None:
            try:
                raw = kept.read_bytes()
                if len(raw) == size:
                    return raw
            except OSError:
                pass  # not fetched yet, or unreadable: the store has it
        raw = storage.retry(lambda: self._fetch(first, size), f"read {self.url}")
        if kept is not None:
            try:
                storage.write_bytes(kept, raw)
            except (DiskFull, UserError, OSError):
                self._folder = None  # no room or no right to keep it: read on without
        return raw

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
            self._file = None  # a broken connection: the next try opens it anew
            raise
        if len(raw) != size:
            self._file = None
            raise OSError(f"{len(raw)} bytes came instead of {size}")
        self.fetched_bytes += size
        return bytes(raw)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a remote array is opened where it is read, not sent")
