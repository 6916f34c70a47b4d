"""Finished work, one JSON line each, so that an interrupted command can continue.

The first line is a key: everything that determines the work. A journal with another key is discarded. An incomplete
last line is ignored. Local folders only; elsewhere nothing is kept and `done` is empty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.errors import DiskFull

__all__ = ["Journal"]


class Journal:
    def __init__(self, path: str | None, key: Any) -> None:
        self.done: list[Any] = []
        self._file = None
        if path is None or not storage.is_local(path):
            return
        file: Path = storage.local_path(path)
        storage.make_dir(file.parent)
        key_line = json.dumps({"key": key}, sort_keys=True)
        lines = file.read_bytes().split(b"\n") if file.exists() else []
        if lines and lines[0].decode("utf-8", "replace") == key_line:
            for line in lines[1:-1]:  # what follows the last newline is incomplete
                try:
                    self.done.append(json.loads(line))
                except ValueError:
                    break
        text = "".join(f"{line}\n" for line in (key_line, *map(json.dumps, self.done)))
        storage.write_bytes(file, text.encode())
        self._path = file
        self._file = file.open("ab", buffering=0)

    def add(self, row: Any) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(row).encode() + b"\n")
            except OSError as error:
                raise DiskFull(str(self._path), f"cannot be written ({error.strerror})", "free some space") from None

    def finish(self) -> None:
        """Remove the journal: the work is complete and stored elsewhere."""
        self.close()
        if self._file is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
