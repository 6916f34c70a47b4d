"""A store that outlives every rank and that no kill can damage: a folder with one small file for each key.

Files appear whole (written aside, then renamed) and changes that depend on the old value hold a lock which the kernel
drops with its holder. For ranks that see one file system. torch's FileStore appends records to one file: a rank that is
killed in the middle of one leaves half a record for the others to stumble over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
        """The value of a key; waits for it."""
        end_s = time.monotonic() + self.timeout_s
        while (found := self._read(key)) is None:
            if time.monotonic() > end_s:
                raise PeerTimeout(f"store key {key}", f"was not set in {self.timeout_s:g} s", "look at the peers")
            time.sleep(POLL_S)
        return found

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` where it has the value `expected` ("": where it is not set); the value it then has."""
        with self._locked():
            found = self._read(key)
            if (found or b"").decode() == expected:
                self.set(key, desired)
                return desired.encode()
            return found if found is not None else expected.encode()

    def add(self, key: str, amount: int) -> int:
        with self._locked():
            total = int(self._read(key) or b"0") + amount
            self.set(key, str(total))
            return total

    def _path(self, key: str) -> Path:
        return self.folder / quote(key, safe="")

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
