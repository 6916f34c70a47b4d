"""Write the documents of one split to its shard and its dropped file, and count them.

    docs-00012.parquet      DOCUMENT rows of split 12, if it kept any
    dropped-00012.parquet   DROPPED rows: repository, path, reason, detail

Row groups hold GROUP_BYTES of text, so that a range read fetches a few MB. `CorpusCounts` are additive: the counts of a
corpus are the sum over its splits, in any order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from posixpath import commonprefix
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import DOCUMENT, DROPPED, rows_of
from lakh.corpus.reports.report import content_sum
from lakh.corpus.shards import ParquetShard, create_shard

__all__ = ["CorpusCounts", "SplitWriter", "write_split"]

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


@contextmanager
def write_split(url: str, split: int) -> Iterator[SplitWriter]:
    """A writer for one split; an exception inside leaves no file."""
    with ExitStack() as stack:
        writer = SplitWriter(url, split, stack)
        yield writer
        writer.flush()
    writer.counts.files = [writer.shards[kind].entry() for kind in sorted(writer.shards)]


class SplitWriter:
    """Writes the STREAM batches of one split (`write_split`)."""

    def __init__(self, url: str, split: int, stack: ExitStack) -> None:
        self.counts = CorpusCounts()
        self.shards: dict[str, ParquetShard] = {}
        self._url, self._split, self._stack = url, split, stack
        self._waiting: list[Any] = []
        self._waiting_bytes = 0

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
            columns = [gone.column("dropped_text" if name == "text" else name) for name in DROPPED.names]
            self._shard("dropped", DROPPED).write(pa.record_batch(columns, schema=DROPPED))
            for reason, size in rows_of(gone, "reason", "size_bytes"):
                counts.dropped[reason] += 1
                counts.dropped_bytes[reason] += size
        kept = batch.filter(is_kept)
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
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            for batch in pa.Table.from_batches(self._waiting).combine_chunks().to_batches():
                self._shard("docs", DOCUMENT).write(batch.select(DOCUMENT.names))
            self._waiting, self._waiting_bytes = [], 0

    def _shard(self, kind: str, schema: Any) -> ParquetShard:
        """The shard of that kind, created with its first row."""
        if kind not in self.shards:
            shard = create_shard(self._url, f"{kind}-{self._split:05d}.parquet", schema)
            self.shards[kind] = self._stack.enter_context(shard)
        return self.shards[kind]


def _first_difference(old: str, new: str) -> tuple[str, str] | None:
    """The first line that differs; the differing part of the old one is masked, since reports are published."""
    for left, right in zip(old.splitlines(), new.splitlines(), strict=False):
        if left != right:
            head = len(commonprefix([left, right]))
            tail = len(commonprefix([left[head:][::-1], right[head:][::-1]]))
            masked = left[:head] + "•" * (len(left) - tail - head) + left[len(left) - tail :]
            start = max(0, head - SHOWN_CHARS // 2)
            return masked[start : start + SHOWN_CHARS].strip(), right[start : start + SHOWN_CHARS].strip()
    return None
