"""Write the documents of one split to its shard and its dropped file, and count them.

    docs-00012.parquet      DOCUMENT rows of split 12, if it kept any
    dropped-00012.parquet   DROPPED rows: repository, path, reason, detail

Row groups hold GROUP_BYTES of text, so that a range read fetches a few MB. `CorpusCounts` are additive: the counts of a
corpus are the sum over its splits, in any order.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import DOCUMENT, DROPPED, rows_of, with_columns
from lakh.corpus.reports.report import content_sum
from lakh.corpus.shards import ParquetShard

__all__ = ["CorpusCounts", "SplitWriter"]

GROUP_BYTES = 8 << 20
MAX_SAMPLES = 12
SPLIT_SAMPLES = 2
SHOWN_CHARS = 160


@dataclass
class CorpusCounts:
    """Totals of a split or of a corpus."""

    read: int = 0
    kept: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    content: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    language_bytes: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    files: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    """Some lines before and after redaction, with the redacted part masked in both."""

    def add(self, other: CorpusCounts) -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)
        self.content %= 1 << 256
        self.samples = sorted(self.samples, key=lambda sample: sample["id"])[:MAX_SAMPLES]

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"content": f"{self.content:064x}"})

    @staticmethod
    def from_json(text: str) -> CorpusCounts:
        data: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in json.loads(text).items()
        }
        return CorpusCounts(**data | {"content": int(data["content"], 16)})


class SplitWriter:
    """Writes the STREAM batches of one split. A context manager: an exception inside leaves no file."""

    def __init__(self, url: str, split: int) -> None:
        self.counts = CorpusCounts()
        self._dropped = ParquetShard(url, f"dropped-{split:05d}.parquet", DROPPED)
        self._docs = ParquetShard(url, f"docs-{split:05d}.parquet", DOCUMENT)
        self._stack = ExitStack()
        self._open: list[ParquetShard] = []
        self._waiting: list[Any] = []
        self._waiting_bytes = 0

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:  # closes or discards all files, even if one of them fails
            if error is not None:
                raise error
            self._flush()
        for file in sorted(self._open, key=lambda item: item.name):
            self.counts.files.append(file.entry())

    def sample_redactions(self, before: Any, after: Any) -> Any:
        """Save some redacted lines for the report; returns `after`."""
        samples = self.counts.samples
        if len(samples) < SPLIT_SAMPLES:
            for row, (found, reason) in enumerate(rows_of(after, "secrets", "reason")):
                if found and not reason and len(samples) < SPLIT_SAMPLES:
                    lines = _first_difference(before.column("text")[row].as_py(), after.column("text")[row].as_py())
                    if lines:
                        place = f"{after.column('repo')[row]}/{after.column('path')[row]}"
                        identity = after.column("id")[row].as_py()
                        samples.append({"id": identity, "place": place, "before": lines[0], "after": lines[1]})
        return after

    def write(self, batch: Any) -> None:
        """Write the rows of one STREAM batch to the two files."""
        counts = self.counts
        is_kept = pc.equal(batch.column("reason"), "")
        gone = batch.filter(pc.invert(is_kept))
        if gone.num_rows:
            rows = gone.select([name for name in DROPPED.names if name != "text"])
            self._file(self._dropped).write(
                pa.record_batch([*rows.columns, gone.column("dropped_text")], schema=DROPPED)
            )
            for reason, size in rows_of(gone, "reason", "size_bytes"):
                counts.dropped[reason] += 1
                counts.dropped_bytes[reason] += size
        kept = _rehash(batch.filter(is_kept))
        counts.read += batch.num_rows
        counts.kept += kept.num_rows
        counts.bytes_in += pc.sum(batch.column("size_bytes")).as_py() or 0
        if not kept.num_rows:
            return
        sizes = pc.binary_length(kept.column("text")).to_pylist()
        counts.bytes_out += sum(sizes)
        for (language, licence, found), size in zip(
            rows_of(kept, "language", "licence", "secrets"), sizes, strict=True
        ):
            counts.languages[language] += 1
            counts.language_bytes[language] += size
            counts.licences[licence] += 1
            if found:
                counts.secrets.update(json.loads(found))
        counts.content = content_sum(rows_of(kept, "id", "sha256"), counts.content)
        self._waiting.append(kept)
        self._waiting_bytes += sum(sizes)
        if self._waiting_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = pa.Table.from_batches(self._waiting).combine_chunks()
        for batch in rows.to_batches():
            self._file(self._docs).write(batch.select(DOCUMENT.names))
        self._waiting, self._waiting_bytes = [], 0

    def _file(self, file: ParquetShard) -> ParquetShard:
        if file not in self._open:
            self._open.append(self._stack.enter_context(file))
        return file


def _rehash(kept: Any) -> Any:
    """Update the hash of texts that were redacted."""
    hashes = kept.column("sha256").to_pylist()
    changed = [row for row, (found,) in enumerate(rows_of(kept, "secrets")) if found]
    for row in changed:
        hashes[row] = hashlib.sha256(kept.column("text")[row].as_py().encode()).hexdigest()
    return with_columns(kept, sha256=hashes) if changed else kept


def _first_difference(old: str, new: str) -> tuple[str, str] | None:
    """The first line that differs; the differing part of the old one is masked, since reports are published."""
    for left, right in zip(old.splitlines(), new.splitlines(), strict=False):
        if left != right:
            head = _common(left, right)
            tail = _common(left[head:][::-1], right[head:][::-1])
            masked = left[:head] + "•" * (len(left) - tail - head) + left[len(left) - tail :]
            start = max(0, head - SHOWN_CHARS // 2)
            return masked[start : start + SHOWN_CHARS].strip(), right[start : start + SHOWN_CHARS].strip()
    return None


def _common(left: str, right: str) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
