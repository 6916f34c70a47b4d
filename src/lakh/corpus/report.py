"""What a corpus holds and what was left out: its manifest, as an object that can be checked.

    read = kept + sum of dropped        always, by construction

`output_sha256` names the content: the sum, modulo 2**256, of one SHA-256 per kept document over its id and
its text's hash. A sum does not depend on order, so it is the same for any shard size, engine or number of
workers, and workers can add up their parts. (It tells equal from different; it is no defence against someone
who forges documents.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lakh import storage
from lakh.corpus.shards import FORMAT, MADE_BY, REBUILD, check_shard
from lakh.errors import CorruptShard, DataError

__all__ = ["Report", "content_sum", "read_report"]

FIELDS = (
    "settings",
    "sources",
    "listing_sha256",
    "read",
    "kept",
    "dropped",
    "bytes_in",
    "bytes_out",
    "languages",
    "licences",
    "shards",
    "dropped_file",
    "output_sha256",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One finished corpus."""

    out: str
    settings: Mapping[str, Any]
    sources: tuple[str, ...]
    listing_sha256: str
    """Names, sizes and times of the files that the sources offered."""
    read: int
    """Files offered, plus one for each distribution that was left out whole."""
    kept: int
    dropped: Mapping[str, int]
    """Reason -> documents; the reasons are explained in document.REASONS."""
    bytes_in: int
    """Bytes of the files that were opened."""
    bytes_out: int
    """Bytes of the kept texts."""
    languages: Mapping[str, int]
    """Language -> kept documents."""
    licences: Mapping[str, int]
    """Licence -> kept documents; "" where nothing is known."""
    shards: tuple[Mapping[str, Any], ...]
    dropped_file: Mapping[str, Any]
    output_sha256: str
    reused: bool = False
    seconds: float = field(default=0.0, compare=False)
    cpu_seconds: float = field(default=0.0, compare=False)

    def manifest(self) -> dict[str, Any]:
        """What manifest.json holds: nothing that differs between two builds of the same sources."""
        return {"format": FORMAT} | {name: _plain(getattr(self, name)) for name in FIELDS}

    def as_dict(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        speed = self.bytes_in / 1e6 / self.cpu_seconds if self.cpu_seconds and not self.reused else None
        return {
            "out": self.out,
            "reused": self.reused,
            "sources": list(self.sources),
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "duplicates": {"exact": self.dropped.get("exact-duplicate", 0)},
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "languages": dict(self.languages),
            "licences": dict(self.licences),
            "shards": len(self.shards),
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "mb_per_cpu_second": speed,
            "output_sha256": self.output_sha256,
        }

    def verify(self) -> int:
        """Read every byte and compare with the manifest; returns the number of files checked."""
        entries = [*self.shards, self.dropped_file]
        for entry in entries:
            url = check_shard(self.out, entry)
            if storage.sha256(url) != entry["sha256"]:
                raise CorruptShard(url, "its bytes do not match its manifest", REBUILD)
        return len(entries)


def read_report(url: str) -> Report:
    """The report of a finished corpus; names the command that makes one where there is none."""
    manifest = storage.read_manifest(url, made_by=MADE_BY)
    if manifest.get("format") != FORMAT:
        raise DataError(
            str(url), f"is no corpus: its format is {manifest.get('format')!r}", f"make one with: {MADE_BY}"
        )
    missing = [name for name in FIELDS if name not in manifest]
    if missing:
        raise DataError(storage.join(url, storage.MANIFEST), f"is damaged: lacks {', '.join(missing)}", REBUILD)
    values = {name: manifest[name] for name in FIELDS}
    values["sources"], values["shards"] = tuple(values["sources"]), tuple(values["shards"])
    return Report(out=str(url), **values)


def content_sum(pairs: Iterable[tuple[str, str]], start: int = 0) -> int:
    """Add the documents (id, sha256 of the text) to a running content hash."""
    for identity, text_sha256 in pairs:
        start += int.from_bytes(hashlib.sha256(f"{identity}\0{text_sha256}".encode()).digest(), "big")
    return start % (1 << 256)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
