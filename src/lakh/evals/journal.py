"""What is already done, one JSON line each, so that work which was stopped goes on where it was.

The first line is a key: whatever decides the work. A journal with another key is not ours and is begun anew. A torn
last line is forgotten. Local folders only; elsewhere there is nothing to go on with, and that is said by `done` being
empty.
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
        place: Path = storage.local_path(path)
        storage.make_dir(place.parent)
        key_line = json.dumps({"key": key}, sort_keys=True)
        lines = place.read_bytes().split(b"\n") if place.exists() else []
        if lines and lines[0].decode("utf-8", "replace") == key_line:
            for line in lines[1:-1]:  # what follows the last newline was not finished
                try:
                    self.done.append(json.loads(line))
                except ValueError:
                    break
        text = "".join(f"{line}\n" for line in (key_line, *map(json.dumps, self.done)))
        storage.write_bytes(place, text.encode())
        self._path = place
        self._file = place.open("ab", buffering=0)

    def add(self, row: Any) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(row).encode() + b"\n")
            except OSError as error:
                raise DiskFull(str(self._path), f"cannot be written ({error.strerror})", "free some space") from None

    def finish(self) -> None:
        """The work is complete and kept elsewhere."""
        self.close()
        if self._file is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
