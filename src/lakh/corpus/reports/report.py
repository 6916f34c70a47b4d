"""The report of a corpus: its manifest, as an object that can be checked.

    read = kept + sum of dropped        always, by construction

`output_sha256` identifies the content: the sum, modulo 2**256, of one SHA-256 per kept document over its id and its
text's hash. A sum does not depend on order, so it is the same for any shard size, engine or number of workers, and
workers can add up their parts. (It compares corpora; it is not a defence against forgery.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lakh import storage
from lakh.corpus.document import REASONS
from lakh.corpus.shards import FORMAT, REBUILD, check_shard, read_corpus_manifest
from lakh.errors import CorruptShard, DataError

__all__ = ["CorpusReport", "content_sum", "read_report"]

FIELDS = (
    "settings", "sources", "listing_sha256", "read", "kept", "dropped", "dropped_bytes", "bytes_in", "bytes_out",
    "languages", "language_bytes", "licences", "secrets", "samples", "earlier", "benchmarks", "versions", "shards",
    "dropped_files", "output_sha256",
)  # fmt: skip
# Fields of `as_dict` that describe a build, not a corpus.
BUILD_FIELDS = ("reused", "seconds", "cpu_seconds", "mb_per_cpu_second", "engine", "tasks", "peak_rss_bytes")
# Fields that a manifest of format 1 lacks.
OLD_FIELDS: Mapping[str, Any] = {
    "dropped_bytes": {}, "language_bytes": {}, "secrets": {}, "versions": {}, "samples": [], "earlier": [],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """One finished corpus."""

    out: str
    settings: Mapping[str, Any]
    sources: tuple[str, ...]
    listing_sha256: str
    """Hash of names, sizes and times of the offered files."""
    read: int
    """Offered files, plus one for each distribution that was dropped as a whole."""
    kept: int
    dropped: Mapping[str, int]
    """Reason -> documents; document.REASONS explains the reasons."""
    dropped_bytes: Mapping[str, int]
    """Reason -> bytes read before the document was dropped."""
    bytes_in: int
    """Bytes of opened files."""
    bytes_out: int
    """Bytes of the kept texts."""
    languages: Mapping[str, int]
    """Language -> kept documents."""
    language_bytes: Mapping[str, int]
    licences: Mapping[str, int]
    """Licence -> kept documents; "" if unknown."""
    secrets: Mapping[str, int]
    """Kind -> redactions in kept documents."""
    samples: tuple[Mapping[str, str], ...]
    """Some lines before and after redaction, masked."""
    earlier: tuple[str, ...]
    """Content hashes of the earlier corpora whose documents were excluded."""
    benchmarks: Mapping[str, str]
    """Benchmarks whose tasks were removed: file -> SHA-256."""
    versions: Mapping[str, str]
    """Versions of lakh and of the libraries that affect the content."""
    shards: tuple[Mapping[str, Any], ...]
    dropped_files: tuple[Mapping[str, Any], ...]
    output_sha256: str
    reused: bool = False
    engine: str = field(default="", compare=False)
    peak_rss_bytes: int = field(default=0, compare=False)
    """Of the largest worker; 0 if unknown."""
    tasks: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Tasks run by this build, and tasks reused from an interrupted one."""
    seconds: float = field(default=0.0, compare=False)
    cpu_seconds: float = field(default=0.0, compare=False)

    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json: nothing that differs between two builds of the same sources."""
        return {"format": FORMAT} | {name: _plain(getattr(self, name)) for name in FIELDS}

    def funnel(self) -> list[tuple[str, int, int]]:
        """(reason, dropped, left after it), in the order in which the build checks the reasons."""
        left, steps = self.read, []
        for reason in [*REASONS, *sorted(set(self.dropped) - set(REASONS))]:
            if self.dropped.get(reason):
                left -= self.dropped[reason]
                steps.append((reason, self.dropped[reason], left))
        return steps

    def as_dict(self) -> dict[str, Any]:
        """The data that `--json` prints."""
        speed = self.bytes_in / 1e6 / self.cpu_seconds if self.cpu_seconds and not self.reused else None
        names = (
            "out", "reused", "sources", "read", "kept", "dropped", "duplicates", "secrets", "bytes_in", "bytes_out",
            "languages", "licences", "benchmarks", "shards", "engine", "tasks", "peak_rss_bytes", "seconds",
            "cpu_seconds", "mb_per_cpu_second", "output_sha256",
        )  # fmt: skip
        dropped = self.dropped.get
        derived = {
            "duplicates": {"exact": dropped("exact-duplicate", 0), "near": dropped("near-duplicate", 0)},
            "shards": len(self.shards),
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "mb_per_cpu_second": speed,
        }
        return {name: derived[name] if name in derived else _plain(getattr(self, name)) for name in names}

    def summary(self, examples: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, Any]:
        """The data that `lakh corpus report --json` prints; `examples` has (place, detail) of dropped documents."""
        data = {name: value for name, value in self.as_dict().items() if name not in BUILD_FIELDS}
        dropped = {
            reason: [{"place": place, "detail": detail} for place, detail in rows] for reason, rows in examples.items()
        }
        return data | {
            "settings": dict(self.settings),
            "funnel": [{"reason": reason, "dropped": gone, "left": left} for reason, gone, left in self.funnel()],
            "samples": {"redacted": [dict(item) for item in self.samples], "dropped": dropped},
        }

    def verify(self) -> int:
        """Read every byte and compare with the manifest; returns the number of files checked."""
        entries = [*self.shards, *self.dropped_files]
        for entry in entries:
            url = check_shard(self.out, entry)
            if storage.sha256(url) != entry["sha256"]:
                raise CorruptShard(url, "its bytes do not match its manifest", REBUILD)
        return len(entries)


def read_report(url: str) -> CorpusReport:
    """The report of a finished corpus; fails with the command that builds one if there is none."""
    manifest = read_corpus_manifest(url)
    manifest = {"benchmarks": {}, **manifest}  # those of earlier versions have none
    if manifest["format"] != FORMAT:
        manifest = {**OLD_FIELDS, **manifest} | {"dropped_files": [manifest.get("dropped_file")]}
    missing = [name for name in FIELDS if name not in manifest]
    if missing:
        raise DataError(storage.join(url, storage.MANIFEST), f"is damaged: lacks {', '.join(missing)}", REBUILD)
    values = {name: manifest[name] for name in FIELDS}
    for name in ("sources", "samples", "earlier", "shards", "dropped_files"):
        values[name] = tuple(values[name])
    return CorpusReport(out=str(url), **values)


def content_sum(pairs: Iterable[tuple[str, str]], start: int = 0) -> int:
    """Add the documents (id, sha256 of the text) to a running content hash."""
    for identity, text_sha256 in pairs:
        start += int.from_bytes(hashlib.sha256(f"{identity}\0{text_sha256}".encode()).digest(), "big")
    return start % (1 << 256)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
