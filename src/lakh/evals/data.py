"""Files of benchmarks: from a given path, the cache, or the official repository.

A file is trusted by its sha256 and never by its name or its source. Downloads are cached in
$XDG_CACHE_HOME/lakh/benchmarks (~/.cache by default) and checked each time they are read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lakh import storage
from lakh.errors import MissingExtra, UserError

__all__ = ["BenchmarkFile", "read_rows"]

DOWNLOAD_TIMEOUT_S = 60.0
LARGEST_DOWNLOAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class BenchmarkFile:
    name: str
    sha256: str
    folder: str = ""
    """URL of its folder in the official repository, at a commit where the file has this hash."""

    def rows(self, data: str | None, needed: Sequence[str]) -> list[dict[str, Any]]:
        return read_rows(self.name, self.read(data), needed)

    def read(self, data: str | None) -> bytes:
        """The file's bytes: from `data` (the file or its folder), the cache, or a download."""
        if data is not None:
            path = data
            if storage.is_local(path) and storage.local_path(path).is_dir():
                path = storage.join(path, self.name)
            return self._checked(path, storage.read_bytes(path))
        cached = storage.cache_folder("benchmarks") / self.name
        if cached.exists():
            return self._checked(str(cached), cached.read_bytes())
        raw = self._checked(self.folder + self.name, self._download())
        storage.write_bytes(cached, raw)
        return raw

    def _checked(self, where: str, raw: bytes) -> bytes:
        found = hashlib.sha256(raw).hexdigest()
        if found != self.sha256:
            todo = f"give --data the original {self.name} as it was published"
            raise UserError(where, f"has sha256 {found} and {self.name} has {self.sha256}", todo)
        return raw

    def _download(self) -> bytes:
        import urllib.error
        import urllib.request

        url, todo = self.folder + self.name, f"give --data the file {self.name}, or a folder that holds it"
        if not self.folder:
            raise UserError(self.name, "has no address to download from", todo)
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
                raw: bytes = response.read(LARGEST_DOWNLOAD_BYTES)
        except (OSError, urllib.error.URLError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(url, f"cannot be downloaded ({reason})", todo) from None
        return raw


def read_rows(name: str, raw: bytes, needed: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, of one JSON list, gzipped or not, or of Parquet, with the `needed` keys."""
    todo = "give --data the benchmark's own file"
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        rows = _parquet_rows(name, raw) if raw[:4] == b"PAR1" else _json_rows(text)
    except (ValueError, RecursionError, OSError, EOFError, zlib.error) as error:
        form = "Parquet" if raw[:4] == b"PAR1" else "JSON lines"
        raise UserError(name, f"is not {form} ({error})", todo) from None
    for number, row in enumerate(rows, start=1):
        missing = [key for key in needed if not isinstance(row, dict) or key not in row]
        if missing:
            raise UserError(f"{name}: row {number}", f"has no {missing[0]}", todo)
    if not rows:
        raise UserError(name, "holds no problems", todo)
    return list(rows)


def _json_rows(text: bytes) -> list[Any]:
    if text.lstrip()[:1] == b"[":
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _parquet_rows(name: str, raw: bytes) -> list[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra(name, "pyarrow", "corpus") from None
    return list(pyarrow.parquet.read_table(pyarrow.BufferReader(raw)).to_pylist())
