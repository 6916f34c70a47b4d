"""The end of the stream: one split's documents into its shard, what was dropped beside it, all of it counted.

    docs-00012.parquet      DOCUMENT rows of split 12, if it kept any
    dropped-00012.parquet   DROPPED rows: place, reason, detail

Rows are written in groups of GROUP_BYTES of text, so that a range read fetches a few MB. `Counts` add up: the counts
of a corpus are the sum of those of its splits, in any order.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import DOCUMENT, DROPPED, Stage
from lakh.corpus.reports.report import content_sum
from lakh.corpus.shards import ParquetShard

__all__ = ["CorpusCounts", "SplitWriter"]

GROUP_BYTES = 8 << 20
MAX_SAMPLES = 12
SPLIT_SAMPLES = 2
SHOWN_CHARS = 160


@dataclass
class CorpusCounts:
    """What a split, or the whole, amounts to."""

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
    """Some lines before and after redaction, what was redacted masked in both."""

    def add(self, other: CorpusCounts) -> None:
        for name in ("read", "kept", "bytes_in", "bytes_out", "content"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.content %= 1 << 256
        for name in ("dropped", "dropped_bytes", "languages", "language_bytes", "licences", "secrets"):
            getattr(self, name).update(getattr(other, name))
        self.files += other.files
        self.samples = sorted(self.samples + other.samples, key=lambda sample: sample["id"])[:MAX_SAMPLES]

    def to_json(self) -> str:
        plain = {name: value if not isinstance(value, Counter) else dict(value) for name, value in vars(self).items()}
        return json.dumps(plain | {"content": f"{self.content:064x}"})

    @staticmethod
    def from_json(text: str) -> CorpusCounts:
        data: Mapping[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in data.items()
        }
        return CorpusCounts(**values | {"content": int(data["content"], 16)})


class SplitWriter:
    """Takes the STREAM batches of one split. A context manager: an exception inside leaves no file."""

    def __init__(self, url: str, split: int) -> None:
        self.url, self.split = url, split
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
        with self._stack:  # all are closed, or all discarded, even if one of them fails
            if error is not None:
                raise error
            self._flush()
        for file in sorted(self._open, key=lambda item: item.name):
            self.counts.files.append(file.entry())

    def sampling(self, stage: Stage) -> Stage:
        """The redacting stage, with some of its changes put aside for the report."""

        def watched(batches: Iterator[Any]) -> Iterator[Any]:
            for before in batches:
                for after in stage(iter([before])):
                    if len(self.counts.samples) < SPLIT_SAMPLES:
                        self._sample(before, after)
                    yield after

        return watched

    def _sample(self, before: Any, after: Any) -> None:
        for row, found in enumerate(after.column("secrets").to_pylist()):
            if found and len(self.counts.samples) < SPLIT_SAMPLES and after.column("reason")[row].as_py() == "":
                old, new = before.column("text")[row].as_py(), after.column("text")[row].as_py()
                lines = _first_difference(old, new)
                if lines:
                    place = f"{after.column('repo')[row].as_py()}/{after.column('path')[row].as_py()}"
                    identity = after.column("id")[row].as_py()
                    self.counts.samples.append({"id": identity, "place": place, "before": lines[0], "after": lines[1]})

    def write(self, batch: Any) -> None:
        """Sort the rows of one STREAM batch into the files."""
        counts = self.counts
        is_kept = pc.equal(batch.column("reason"), "")
        gone = batch.filter(pc.invert(is_kept))
        if gone.num_rows:
            texts = gone.column("dropped_text")
            rows = gone.select([name for name in DROPPED.names if name != "text"])
            self._file(self._dropped).write(pa.record_batch([*rows.columns, texts], schema=DROPPED))
            counts.dropped.update(gone.column("reason").to_pylist())
            for reason, size in zip(
                gone.column("reason").to_pylist(), gone.column("size_bytes").to_pylist(), strict=True
            ):
                counts.dropped_bytes[reason] += size
        kept = _rehash(batch.filter(is_kept))
        counts.read += batch.num_rows
        counts.kept += kept.num_rows
        counts.bytes_in += pc.sum(batch.column("size_bytes")).as_py() or 0
        if not kept.num_rows:
            return
        sizes = pc.binary_length(kept.column("text")).to_pylist()
        counts.bytes_out += sum(sizes)
        counts.languages.update(kept.column("language").to_pylist())
        for language, size in zip(kept.column("language").to_pylist(), sizes, strict=True):
            counts.language_bytes[language] += size
        counts.licences.update(kept.column("licence").to_pylist())
        for found in kept.column("secrets").to_pylist():
            if found:
                counts.secrets.update(json.loads(found))
        pairs = zip(kept.column("id").to_pylist(), kept.column("sha256").to_pylist(), strict=True)
        counts.content = content_sum(pairs, counts.content)
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
    """Texts that a stage has changed (secrets) get the hash of what they are now."""
    changed = [row for row, found in enumerate(kept.column("secrets").to_pylist()) if found]
    if not changed:
        return kept
    hashes = kept.column("sha256").to_pylist()
    texts = kept.column("text")
    for row in changed:
        hashes[row] = hashlib.sha256(texts[row].as_py().encode()).hexdigest()
    return kept.set_column(kept.schema.get_field_index("sha256"), "sha256", pa.array(hashes, pa.string()))


def _first_difference(old: str, new: str) -> tuple[str, str] | None:
    """The first line that differs; what is different in the old one is masked, since a report is shown around."""
    for left, right in zip(old.splitlines(), new.splitlines(), strict=False):
        if left != right:
            head = _common(left, right)
            tail = _common(left[head:][::-1], right[head:][::-1])
            middle = left[head : len(left) - tail]
            masked = left[:head] + "•" * len(middle) + left[len(left) - tail :]
            start = max(0, head - SHOWN_CHARS // 2)
            return masked[start : start + SHOWN_CHARS].strip(), right[start : start + SHOWN_CHARS].strip()
    return None


def _common(left: str, right: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
