"""A key-value store in a folder, one small file per key. It outlives every rank and survives kills at any moment.

Files appear atomically (written aside, then renamed). `compare_set` holds a file lock, which the kernel
releases when its holder dies. Requires a file system that all ranks share. torch's FileStore appends records to one
file, so a rank killed while writing leaves half a record that breaks the other ranks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from lakh.errors import PeerTimeout

__all__ = ["DirectoryStore"]

POLL_S = 0.005


class DirectoryStore:
    """The methods of torch's stores that c3 uses."""

    def __init__(self, folder: str | Path, timeout_s: float = 60.0) -> None:
        self.folder, self.timeout_s = Path(folder), timeout_s
        self.folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: Any) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        aside = self.folder / f".{os.getpid()}-{secrets.token_hex(4)}"
        aside.write_bytes(raw)
        aside.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """The value of a key; blocks until it is set."""
        end_s = time.monotonic() + self.timeout_s
        while (found := self._read(key)) is None:
            if time.monotonic() > end_s:
                raise PeerTimeout(f"store key {key}", f"was not set in {self.timeout_s:g} s", "check the peers")
            time.sleep(POLL_S)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`."""
        start = quote(prefix, safe="")
        return sorted(unquote(path.name) for path in self.folder.iterdir() if path.name.startswith(start))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if its value is `expected` ("" if unset); returns the value afterwards."""
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = self._read(key)
            if (found or b"").decode() == expected:
                self.set(key, desired)
                return desired.encode()
            return found if found is not None else expected.encode()

    def _path(self, key: str) -> Path:
        return self.folder / quote(key, safe="")

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
