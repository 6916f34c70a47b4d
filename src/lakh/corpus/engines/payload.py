"""Rows as they travel through somebody else's engine: (port, bucket, Arrow bytes), and steps called on them.

Beam and Spark know nothing of our schemas; they group payloads by bucket, and each payload is a batch of rows of one
port. What both need is here: the first payloads of a step, and one bucket's payloads through the step's function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.engines import PipelineStep
from lakh.corpus.engines.exchange import decode, encode, split_rows
from lakh.corpus.task_progress import TaskProgress

__all__ = ["START", "Payload", "call_step"]

Payload = tuple[str, int, bytes]
START = ""
"""The port of the empty payload that every bucket gets, so that a step is called for empty buckets too."""
MAX_PAYLOAD_BYTES = 16 << 20


def call_step(
    plan: CorpusBuildPlan, step: PipelineStep, bucket: int, arrived: Iterable[tuple[str, bytes]]
) -> Iterator[Payload]:
    """The step's function on one bucket; `arrived` are (input port, bytes)."""
    by_port: dict[str, list[bytes]] = defaultdict(list)
    for port, content in arrived:
        if port != START:
            by_port[port].append(content)

    def given(port: str) -> Iterator[object]:
        for content in sorted(by_port[port]):  # whatever the order in which the engine brought them
            yield from decode(content)

    for port, batch in step.function(plan, bucket, given, TaskProgress()):
        for start in range(0, batch.num_rows, _rows_at_once(batch)):
            for target, rows in split_rows(batch.slice(start, _rows_at_once(batch))):
                yield port, target, encode([rows])


def _rows_at_once(batch: object) -> int:
    rows, size = int(batch.num_rows), int(batch.nbytes)  # type: ignore[attr-defined]
    return max(1, rows if size <= MAX_PAYLOAD_BYTES else rows * MAX_PAYLOAD_BYTES // size)
