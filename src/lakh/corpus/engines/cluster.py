"""What the Beam and Spark engines share: payloads, the call of a step on one bucket, and errors of the runner.

Both group payloads (port, bucket, Arrow bytes) by bucket; a payload is a batch of rows of one port, and its schema does
not matter to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.engines import PipelineStep
from lakh.corpus.engines.exchange import decode, encode, split_rows
from lakh.corpus.task_progress import TaskProgress
from lakh.errors import PeerLost

__all__ = ["START", "Payload", "call_step", "runner_failed"]

Payload = tuple[str, int, bytes]
START = ""
"""The port of an empty payload that every bucket gets, so that a step also runs for empty buckets."""
MAX_PAYLOAD_BYTES = 16 << 20


def call_step(
    plan: CorpusBuildPlan, step: PipelineStep, bucket: int, arrived: Iterable[tuple[str, bytes]]
) -> Iterator[Payload]:
    """Call the step's function for one bucket; `arrived` are (input port, bytes)."""
    by_port: dict[str, list[bytes]] = defaultdict(list)
    for port, content in arrived:
        if port != START:
            by_port[port].append(content)

    def inputs(port: str) -> Iterator[object]:
        for content in sorted(by_port[port]):  # independent of the order of arrival
            yield from decode(content)

    for port, batch in step.function(plan, bucket, inputs, TaskProgress()):
        rows, size = batch.num_rows, batch.nbytes
        at_once = max(1, rows if size <= MAX_PAYLOAD_BYTES else rows * MAX_PAYLOAD_BYTES // size)
        for start in range(0, rows, at_once):
            for target, part in split_rows(batch.slice(start, at_once)):
                yield port, target, encode([part])


def runner_failed(runner: str, error: BaseException, line: int) -> PeerLost:
    """An error of the runner itself: the first (0) or last (-1) line of its message, or the last one with "Error"."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
    shown = lines[0] if line == 0 else next((text for text in reversed(lines) if "Error" in text), lines[-1])
    return PeerLost(runner, shown[:300], "look at the runner's own log, then run the command again")
