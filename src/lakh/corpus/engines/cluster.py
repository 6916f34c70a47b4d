"""What the Beam and Spark engines share: payloads, the call of a step on one bucket, and errors of the runner.

Both group payloads (port, bucket, Arrow bytes) by bucket; a payload is a batch of rows of one port, and its schema does
not matter to them.

A bucket's output is committed to the work folder, as the local engine does, before the framework gets it. A second
start of an interrupted build calls no step again whose output is there; it only sends that output again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lakh import storage
from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.engines import PipelineStep, StepOutput
from lakh.corpus.engines.exchange import commit_task, decode, finished_tasks, read_marker, sections, task_name
from lakh.corpus.task_progress import TaskProgress
from lakh.errors import PeerLost

__all__ = ["START", "Payload", "call_step", "count_tasks", "runner_failed"]

Payload = tuple[str, int, bytes]
START = ""
"""The port of an empty payload that every bucket gets, so that a step also runs for empty buckets."""
MAX_PAYLOAD_BYTES = 16 << 20


def call_step(
    plan: CorpusBuildPlan, step: PipelineStep, bucket: int, arrived: Iterable[tuple[str, bytes]]
) -> Iterator[Payload]:
    """Call the step's function for one bucket; `arrived` are (input port, bytes)."""
    folder = storage.join(plan.work, step.name)
    marker = read_marker(storage.join(folder, f"{task_name(bucket)}.json"))
    if marker is None:
        by_port: dict[str, list[bytes]] = defaultdict(list)
        for port, content in arrived:
            if port != START:
                by_port[port].append(content)

        def inputs(port: str) -> Iterator[object]:
            for content in sorted(by_port[port]):  # independent of the order of arrival
                yield from decode(content)

        marker = commit_task(folder, bucket, _in_slices(step.function(plan, bucket, inputs, TaskProgress())))
    for port, run in sorted(marker["runs"].items()):
        for target, section in sections(folder, run):
            yield port, target, section


def count_tasks(plan: CorpusBuildPlan, step: PipelineStep) -> tuple[int, int]:
    """(tasks to run, tasks that an interrupted build has finished)."""
    finished = finished_tasks(storage.join(plan.work, step.name))
    num_reused = sum(bucket in finished for bucket in range(step.num_buckets))
    return step.num_buckets - num_reused, num_reused


def _in_slices(output: StepOutput) -> StepOutput:
    """The same rows in batches of at most MAX_PAYLOAD_BYTES."""
    for port, batch in output:
        rows, size = batch.num_rows, batch.nbytes
        at_once = max(1, rows if size <= MAX_PAYLOAD_BYTES else rows * MAX_PAYLOAD_BYTES // size)
        for start in range(0, rows, at_once):
            yield port, batch.slice(start, at_once)


def runner_failed(runner: str, error: BaseException, line: int) -> PeerLost:
    """An error of the runner itself: the first (0) or last (-1) line of its message, or the last one with "Error"."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
    shown = lines[0] if line == 0 else next((text for text in reversed(lines) if "Error" in text), lines[-1])
    return PeerLost(runner, shown[:300], "look at the runner's own log, then run the command again")
