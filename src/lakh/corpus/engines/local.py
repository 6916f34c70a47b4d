"""The engine of one machine, or of an array of machines that share the work folder.

Each bucket of a step is a task. Its rows for later steps go into runs (exchange.py), then its marker is written: a task
with a marker is never done again, so a build that was killed goes on where it stood. Tasks are done by workers
(workers.py) whose memory is limited and whose death is survived; a single task of small files, which has no use for a
second process, is done in this one (`is_done_here`).

A Slurm array is this engine with `member` = (number, of how many): each member does its share of every step's tasks and
waits for the others' markers before the next step.

Fails with what a task fails with; PeerTimeout where another member's markers do not come.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lakh import storage
from lakh.corpus.build_plan import AlreadyBuilt, CorpusBuildPlan
from lakh.corpus.document import Progress
from lakh.corpus.engines import MEMBER_POLL_S, MEMBER_TIMEOUT_S, MEMORY_PER_WORKER_BYTES, PipelineStep, PortRows
from lakh.corpus.engines.exchange import ShuffleWriter, TaskMarker, read_marker, read_section
from lakh.corpus.engines.worker_pool import TaskDone, WorkerPool
from lakh.corpus.task_progress import TaskProgress
from lakh.errors import CorruptShard, PeerTimeout

__all__ = ["LocalEngine", "LocalRows"]

SMALL_FILE_BYTES = 4_000_000
"""No stage takes more than some hundred MB for a file of up to this size."""


@dataclass(frozen=True)
class LocalRows:
    """The rows of one port: where its runs are."""

    folder: str
    port: str
    num_tasks: int


@dataclass(frozen=True)
class StepTasks:
    """What a worker needs to know to run any task of a step."""

    plan: CorpusBuildPlan
    step: PipelineStep
    folder: str
    inputs: tuple[tuple[str, tuple[LocalRows, ...]], ...]

    @property
    def name(self) -> str:
        return self.step.name


class LocalEngine:
    name = "local"

    def __init__(
        self,
        plan: CorpusBuildPlan,
        *,
        workers: int = 0,
        memory_bytes: int = MEMORY_PER_WORKER_BYTES,
        member: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
    ) -> None:
        self.plan, self.member, self.progress = plan, member, progress
        self.leads = member[0] == 0
        self.num_workers = workers or len(os.sched_getaffinity(0))
        self._workers = WorkerPool(self.num_workers, memory_bytes)
        self.peak_rss_bytes, self.cpu_seconds = 0, 0.0
        self.tasks_run = self.tasks_reused = 0
        _marker.cache_clear()  # an earlier build of this process may have had the same folder

    def run(self, step: PipelineStep, inputs: Mapping[str, Sequence[PortRows]]) -> dict[str, PortRows]:
        folder = storage.join(self.plan.work, step.name)
        finished = _finished_tasks(folder)
        number, of = self.member
        mine = [task for task in range(step.num_buckets) if task % of == number]
        todo = [task for task in mine if task not in finished]
        self.tasks_reused += len(mine) - len(todo)
        self._do(StepTasks(self.plan, step, folder, tuple((k, tuple(v)) for k, v in inputs.items())), mine, todo)
        if of > 1 and (self.leads or not step.is_last):
            _await_members(folder, step, self.plan.out)
        return {port: LocalRows(folder, port, step.num_buckets) for port in step.ports}

    def collect(self, rows: PortRows) -> Iterator[Any]:
        for task in range(rows.num_tasks):
            run = _marker(rows.folder, task)["runs"].get(rows.port)
            if run:
                for bucket in sorted(map(int, run["index"])):
                    yield from read_section(rows.folder, run, bucket)

    def keep(self, *rows: PortRows) -> None:
        """Files stay where they are."""

    def close(self) -> None:
        self._workers.close()

    def _do(self, job: StepTasks, mine: Sequence[int], todo: Sequence[int]) -> None:
        step, seen = job.step, 0
        bytes_each = step.total_bytes // max(1, step.num_buckets)
        done_bytes = bytes_each * (len(mine) - len(todo)) if step.total_bytes else 0

        def ticked(size: int) -> None:
            nonlocal done_bytes
            done_bytes += size
            if self.progress and step.total_bytes:
                self.progress(step.says, min(done_bytes, step.total_bytes), step.total_bytes)

        def done(task: TaskDone) -> None:
            nonlocal seen
            seen += 1
            self.tasks_run += 1
            self.cpu_seconds += task.cpu_seconds
            self.peak_rss_bytes = max(self.peak_rss_bytes, task.peak_rss_bytes)
            if self.progress and not step.total_bytes:
                self.progress(step.says, len(mine) - len(todo) + seen, len(mine))

        if not runs_in_process(job.plan, len(todo)):
            self._workers.run(run_task, job, todo, ticked, done)
            return
        for task in todo:
            run_task(job, task, TaskProgress(ticked))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            done(TaskDone(task, None, 0.0, peak))  # CPU time of this process is counted by whoever called


def runs_in_process(plan: CorpusBuildPlan, num_tasks: int) -> bool:
    """Whether a step is worth no worker of its own: one task, of files that cannot hurt, that killed nobody yet."""
    return num_tasks == 1 and not plan.resumed and plan.settings.filters.max_file_bytes <= SMALL_FILE_BYTES


def run_task(job: StepTasks, number: int, task: TaskProgress) -> None:
    """One task in whatever process: read its bucket, call the function, write the runs, then the marker."""
    inputs = dict(job.inputs)

    def given(port: str) -> Iterator[Any]:
        for rows in inputs.get(port, ()):
            for task in range(rows.num_tasks):
                run = _marker(rows.folder, task)["runs"].get(rows.port)
                if run:
                    yield from read_section(rows.folder, run, number)

    name = f"task-{number:05d}"
    with ShuffleWriter(job.folder, name) as out:
        for port, batch in job.step.function(job.plan, number, given, task):
            out.write(port, batch)
        marker = out.marker()
    storage.write_bytes(storage.join(job.folder, f"{name}.json"), json.dumps(marker).encode())


@lru_cache(maxsize=100_000)
def _marker(folder: str, task: int) -> TaskMarker:
    url = storage.join(folder, f"task-{task:05d}.json")
    marker = read_marker(url)
    if marker is None:
        raise CorruptShard(url, "is missing or damaged", "run the same command again")
    return marker


def _finished_tasks(folder: str) -> set[int]:
    """Tasks whose marker is there and whole."""
    finished = set()
    for name in storage.list_dir(folder):
        if name.startswith("task-") and name.endswith(".json"):
            number = int(name[5:-5])
            if read_marker(storage.join(folder, name)) is not None:
                finished.add(number)
    return finished


def _await_members(folder: str, step: PipelineStep, out: str) -> None:
    deadline_s = time.monotonic() + MEMBER_TIMEOUT_S
    while True:
        missing = step.num_buckets - len(_finished_tasks(folder))
        if not missing:
            return
        if storage.is_complete(out):
            raise AlreadyBuilt
        if time.monotonic() > deadline_s:
            found = (
                f"{missing} of {step.num_buckets} tasks were not done within MEMBER_TIMEOUT_S = {MEMBER_TIMEOUT_S:g} s"
            )
            raise PeerTimeout(f"step {step.name}", found, "look at the other members, then run this one again")
        time.sleep(MEMBER_POLL_S)
