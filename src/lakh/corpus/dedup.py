"""One copy of each text (exact duplicates, by the SHA-256 of a normalised form), and a cap on each
repository's share.

Both decisions need to see every document once before the first can be let through, so a build has two passes:
the first fills `Copies` (digest -> the copy to keep) while the parsed texts are spooled to disk, the second
reads the spool and drops the rest. The spool, rather than reading the sources again, makes both passes see
the same bytes even when a file changes under us, and keeps parsing, the dear part, to one pass.

The kept copy is the smallest (repo, path), never the first to arrive: any order, and any split over workers
whose `Copies` are then merged, keeps the same documents.

Cost: one entry per distinct text, about 300 bytes; a million documents take 0.3 GB. Texts are never held.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow.compute as pc

from lakh.corpus.document import Stage, document_id, drop

__all__ = ["Copies", "Copy", "cap_repositories", "digest_of", "keep_one_copy", "over_share"]

DIGEST_BYTES = 16


class Copy(NamedTuple):
    """Sorts by place: the smallest one is kept."""

    repo: str
    path: str
    text_bytes: int


@dataclass
class Copies:
    """For each distinct text, the copy that is kept."""

    best: dict[bytes, Copy] = field(default_factory=dict)

    def add(self, batch: Any) -> None:
        """Take note of the rows of a STREAM batch that are still alive."""
        names = ("digest", "repo", "path", "reason")
        digests, repos, paths, reasons = (batch.column(name).to_pylist() for name in names)
        sizes = pc.binary_length(batch.column("text")).to_pylist()
        for digest, repo, path, size, reason in zip(digests, repos, paths, sizes, reasons, strict=True):
            if not reason:
                self._offer(digest, Copy(repo, path, size))

    def merge(self, other: Copies) -> None:
        for digest, copy in other.best.items():
            self._offer(digest, copy)

    def _offer(self, digest: bytes, copy: Copy) -> None:
        best = self.best.get(digest)
        if best is None or copy < best:
            self.best[digest] = copy


def digest_of(text: str) -> bytes:
    """Equal for texts that differ only in line ends, blanks at the end of lines, and blank lines."""
    lines = (line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).digest()[:DIGEST_BYTES]


def keep_one_copy(copies: Copies) -> Stage:
    """The stage that drops every document whose text another one keeps."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            reasons, details = [], []
            columns = (batch.column(name).to_pylist() for name in ("digest", "repo", "path", "reason"))
            for digest, repo, path, reason in zip(*columns, strict=True):
                best = None if reason else copies.best[digest]
                is_copy = best is not None and (best.repo, best.path) != (repo, path)
                reasons.append("exact-duplicate" if is_copy else "")
                details.append(f"of {best.repo}/{best.path}" if best is not None and is_copy else "")
            yield drop(batch, reasons, details)

    return stage


def over_share(copies: Iterable[Copy], per_repo_bytes: int, seed: int) -> frozenset[str]:
    """Ids of the documents for which their repository has no room.

    A repository's files are taken in the order of a keyed hash (so that no folder and no letter is favoured)
    until the next one would not fit. A file that alone is larger than the share is passed over.
    """
    if not per_repo_bytes:
        return frozenset()
    by_repo: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for copy in copies:
        by_repo[copy.repo].append((document_id(copy.repo, copy.path), copy.text_bytes))
    left_out = []
    key = seed.to_bytes(8, "little")
    for files in by_repo.values():
        files.sort(key=lambda item: hashlib.blake2b(item[0].encode(), key=key).digest())
        taken, full = 0, False
        for identity, size in files:
            if size <= per_repo_bytes and not full:
                full = taken + size > per_repo_bytes
            if full or size > per_repo_bytes:
                left_out.append(identity)
            else:
                taken += size
    return frozenset(left_out)


def cap_repositories(left_out: frozenset[str]) -> Stage:
    """The stage that drops the documents chosen by `over_share`."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            reasons = ["over-repo-share" if identity in left_out else "" for identity in batch.column("id").to_pylist()]
            yield drop(batch, reasons, [""] * len(reasons))

    return stage
