"""The engine of one machine, or of a job array of machines that share the work folder.

Each bucket of a step is a task. Its rows for later steps go to runs (exchange.py), then its marker is written: a task
with a marker never runs again, so an interrupted build resumes. Tasks run in a pool of workers with limited memory
(worker_pool.py); a single task of small files runs in this process, because a second one would cost more than it saves.

In a Slurm array, `member` = (index, count): each member runs its share of every step's tasks and waits for the others'
markers before the next step.

Fails with the errors of tasks; PeerTimeout if another member's markers do not appear.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lakh import storage
from lakh.corpus.build_plan import AlreadyBuilt, CorpusBuildPlan
from lakh.corpus.engines import (
    MEMBER_POLL_S,
    MEMBER_TIMEOUT_S,
    CorpusEngine,
    EngineOptions,
    PipelineStep,
    PortRows,
)
from lakh.corpus.engines.exchange import (
    TaskMarker,
    commit_task,
    finished_tasks,
    read_marker,
    read_section,
    task_name,
)
from lakh.corpus.engines.worker_pool import TaskDone, WorkerPool
from lakh.corpus.task_progress import TaskProgress
from lakh.errors import CorruptShard, PeerTimeout

__all__ = ["LocalEngine", "LocalRows"]

SMALL_FILE_BYTES = 4_000_000
"""No filter needs more than some hundred MB for a file of up to this size."""


@dataclass(frozen=True)
class LocalRows:
    """The runs of one port."""

    folder: str
    port: str
    num_tasks: int

    def runs(self) -> Iterator[Mapping[str, Any]]:
        for task in range(self.num_tasks):
            run = _marker(self.folder, task)["runs"].get(self.port)
            if run:
                yield run


@dataclass(frozen=True)
class StepTasks:
    """What a worker needs to run any task of a step."""

    plan: CorpusBuildPlan
    step: PipelineStep
    folder: str
    inputs: tuple[tuple[str, tuple[LocalRows, ...]], ...]

    @property
    def name(self) -> str:
        return self.step.name


class LocalEngine(CorpusEngine):
    def __init__(self, plan: CorpusBuildPlan, options: EngineOptions) -> None:
        super().__init__(plan, options)
        self._pool = WorkerPool(options.num_workers, options.memory_bytes)
        _marker.cache_clear()  # an earlier build in this process may have used the same folder

    def run(self, step: PipelineStep, inputs: Mapping[str, Sequence[PortRows]]) -> dict[str, PortRows]:
        folder = storage.join(self.plan.work, step.name)
        finished = finished_tasks(folder)
        index, count = self.options.member
        mine = [task for task in range(step.num_buckets) if task % count == index]
        todo = [task for task in mine if task not in finished]
        self.tasks_reused += len(mine) - len(todo)
        tasks = StepTasks(self.plan, step, folder, tuple((port, tuple(rows)) for port, rows in inputs.items()))
        self._run_tasks(tasks, mine, todo)
        if count > 1 and (self.leads or not step.is_last):
            _await_members(folder, step, self.plan.out)
        return {port: LocalRows(folder, port, step.num_buckets) for port in step.ports}

    def collect(self, rows: PortRows) -> Iterator[Any]:
        for run in rows.runs():
            for bucket in sorted(map(int, run["index"])):
                yield from read_section(rows.folder, run, bucket)

    def close(self) -> None:
        self._pool.close()

    def _run_tasks(self, tasks: StepTasks, mine: Sequence[int], todo: Sequence[int]) -> None:
        step, num_done = tasks.step, len(mine) - len(todo)
        done_bytes = step.total_bytes // max(1, step.num_buckets) * num_done

        def advanced(size: int) -> None:
            nonlocal done_bytes
            done_bytes += size
            if self.progress and step.total_bytes:
                self.progress(step.activity, min(done_bytes, step.total_bytes), step.total_bytes)

        def done(task: TaskDone) -> None:
            nonlocal num_done
            num_done += 1
            self.tasks_run += 1
            self.cpu_seconds += task.cpu_seconds
            self.peak_rss_bytes = max(self.peak_rss_bytes, task.peak_rss_bytes)
            if self.progress and not step.total_bytes:
                self.progress(step.activity, num_done, len(mine))

        if not runs_in_process(tasks.plan, len(todo)):
            self._pool.run(run_task, tasks, todo, advanced, done)
            return
        for task in todo:
            run_task(tasks, task, TaskProgress(advanced))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            done(TaskDone(task, 0.0, peak))  # the caller counts the CPU time of this process


def runs_in_process(plan: CorpusBuildPlan, num_tasks: int) -> bool:
    """Whether a step needs no worker: a single task of small files, in a build that was not interrupted."""
    return num_tasks == 1 and not plan.resumed and plan.settings.filters.max_file_bytes <= SMALL_FILE_BYTES


def run_task(tasks: StepTasks, number: int, progress: TaskProgress) -> None:
    """Read the bucket, call the step's function, write the runs, then the marker."""
    sources = dict(tasks.inputs)

    def inputs(port: str) -> Iterator[Any]:
        for rows in sources.get(port, ()):
            for run in rows.runs():
                yield from read_section(rows.folder, run, number)

    commit_task(tasks.folder, number, tasks.step.function(tasks.plan, number, inputs, progress))


@lru_cache(maxsize=100_000)
def _marker(folder: str, task: int) -> TaskMarker:
    url = storage.join(folder, f"{task_name(task)}.json")
    marker = read_marker(url)
    if marker is None:
        raise CorruptShard(url, "is missing or damaged", "run the same command again")
    return marker


def _await_members(folder: str, step: PipelineStep, out: str) -> None:
    deadline_s = time.monotonic() + MEMBER_TIMEOUT_S
    while missing := step.num_buckets - len(finished_tasks(folder)):
        if storage.is_complete(out):
            raise AlreadyBuilt
        if time.monotonic() > deadline_s:
            within = f"within MEMBER_TIMEOUT_S = {MEMBER_TIMEOUT_S:g} s"
            found = f"{missing} of {step.num_buckets} tasks were not done {within}"
            raise PeerTimeout(f"step {step.name}", found, "look at the other members, then run this one again")
        time.sleep(MEMBER_POLL_S)
