"""How large a build is, before it starts: splits, buckets, and the memory of a worker.

The counts are those of build_plan.py. The memory follows from BYTES_A_DOCUMENT, which
`python -m bench.corpus.step_memory` measures: the peak memory of each step for one document of its bucket, with the
payloads that Spark or Beam hand over still in memory. A worker needs that for all documents of the fullest bucket, and
what Python and the libraries take.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lakh.corpus.build_plan import BUCKET_TEXT_BYTES, MAX_BUCKETS, MAX_SPLITS, count_buckets
from lakh.corpus.dedup.minhash import fit_bands
from lakh.corpus.settings import Settings

__all__ = ["BYTES_A_DOCUMENT", "BuildSize", "build_size"]

BYTES_A_DOCUMENT = {"places": 2_535, "exact": 7_473, "pairs": 10_445, "attach": 5_149, "verify": 6_651}
"""Peak bytes of a step for each document of its bucket, at MEASURED_BANDS bands."""
MEASURED_BANDS = 16
NEAR_STEPS = ("pairs", "attach", "verify")
SCALE_WITH_BANDS = ("exact", "pairs")
WORKER_BASE_BYTES = 400 << 20
"""An allowance for a worker that has imported and compiled everything and holds no documents."""
DROPPED_ROW_BYTES = 630
"""Peak bytes of the last step for each document of its split that deduplication dropped."""
SPREAD = 1.1
"""The fullest bucket beside the average one: keys are hashed, and documents differ in size."""


@dataclass(frozen=True)
class BuildSize:
    text_bytes: int
    documents: int
    splits: int
    documents_a_split: int
    buckets: int
    documents_a_bucket: int
    bands: int
    step_bytes: dict[str, int]
    """Memory of one task of each step, in the fullest bucket or split."""

    @property
    def worker_bytes(self) -> int:
        return WORKER_BASE_BYTES + max(self.step_bytes.values())

    @property
    def has_full_buckets(self) -> bool:
        """Whether more buckets would be needed than there may be, so that tasks grow with the build."""
        return self.text_bytes > MAX_BUCKETS * BUCKET_TEXT_BYTES

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worker_bytes": self.worker_bytes, "has_full_buckets": self.has_full_buckets}

    def describe(self) -> str:
        largest = max(self.step_bytes, key=lambda step: self.step_bytes[step])
        mebibytes = -(-self.worker_bytes >> 20)
        lines = [
            f"text             {self.text_bytes / 1e9:,.1f} GB in {self.documents:,} documents",
            f"splits           {self.splits:,}, of {self.documents_a_split:,} documents",
            f"buckets          {self.buckets:,}, of {self.documents_a_bucket:,} documents with {self.bands} bands",
            f"worker           {mebibytes:,} MiB, for the step {largest}",
            f"on this machine  --worker-memory {mebibytes}",
            f"on Spark         --engine-option spark.executor.pyspark.memory={mebibytes}m",
        ]
        if self.has_full_buckets:
            lines.append(
                f"warning          {MAX_BUCKETS:,} buckets are the most there are: memory grows with the build"
            )
        return "\n".join(lines)


def build_size(text_bytes: int, documents: int, settings: Settings) -> BuildSize:
    """The size of a build of records with so much text."""
    splits = max(1, min(MAX_SPLITS, text_bytes // settings.split_bytes))
    buckets = count_buckets(splits, text_bytes)
    bands = fit_bands(settings.near.threshold).bands
    a_split, a_bucket = -(-documents // splits), -(-documents // buckets)
    step_bytes = {
        step: int(size * (bands / MEASURED_BANDS if step in SCALE_WITH_BANDS else 1) * a_bucket * SPREAD)
        for step, size in BYTES_A_DOCUMENT.items()
        if settings.near.enabled or step not in NEAR_STEPS
    }
    step_bytes["finish"] = int(DROPPED_ROW_BYTES * a_split * SPREAD)
    return BuildSize(text_bytes, documents, splits, a_split, buckets, a_bucket, bands, step_bytes)
