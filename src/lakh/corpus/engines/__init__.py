"""Engines: where the steps of a build run, and how rows move between them.

A *step* is a plain function that an engine calls once per bucket with all rows of that bucket, and that yields (port,
rows) pairs; the BUCKET column of each row names its next bucket:

    function(plan, bucket, inputs, task) -> Iterator[(port, RecordBatch)]

`inputs(port)` iterates over the bucket's rows of one input, in no particular order; `task` reports progress
(task_progress.py). Texts do not move: steps write them to files of the work folder, by split, so an exchange carries
only keys and dropped rows.

    local   processes of this machine, files in the work folder         engines/local.py
    beam    an Apache Beam pipeline; the exchange is GroupByKey         engines/beam.py
    spark   mapInArrow on a Spark cluster; the exchange is its shuffle  engines/spark.py

A step may run twice (a lost worker, a speculative copy): it writes the same bytes under the same names. The result
depends on the rows, never on their order, on the number of workers or on the engine.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.document import Progress
from lakh.corpus.task_progress import TaskProgress
from lakh.errors import UserError

__all__ = [
    "ENGINES",
    "MEMBER_POLL_S",
    "MEMBER_TIMEOUT_S",
    "MEMORY_PER_WORKER_BYTES",
    "CorpusEngine",
    "EngineOptions",
    "PipelineStep",
    "PortRows",
    "StepFunction",
    "StepInputs",
    "StepOutput",
    "open_engine",
]

StepInputs = Callable[[str], Iterator[Any]]
StepOutput = Iterator[tuple[str, Any]]
StepFunction = Callable[[CorpusBuildPlan, int, StepInputs, TaskProgress], StepOutput]
PortRows = Any
"""An engine's own handle of the rows of one port."""

ENGINES = ("local", "beam", "spark")
MEMBER_TIMEOUT_S = 6 * 3600.0
"""How long a member of a job array waits for the others' part of a step."""
MEMBER_POLL_S = 2.0
MEMORY_PER_WORKER_BYTES = 1 << 30


@dataclass(frozen=True)
class PipelineStep:
    """One function, called once per bucket."""

    name: str
    function: StepFunction
    """Importable by name: other processes and machines call it."""
    num_buckets: int
    ports: tuple[str, ...] = ()
    activity: str = ""
    """Label of the progress bar."""
    is_last: bool = False
    """Only the leading engine waits for the end of the last step."""
    total_bytes: int = 0
    """Sum of the reported progress; 0 if only finished buckets count."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs; each engine uses the part that applies to it."""

    workers: int = 0
    """Processes; 0 is one per core."""
    memory_bytes: int = MEMORY_PER_WORKER_BYTES
    """Memory limit of a local worker."""
    member: tuple[int, int] = (0, 1)
    """(index, count) of this part of a job array of local engines."""
    framework: Sequence[str] = ()
    """Beam's or Spark's own options."""
    progress: Progress | None = None

    @property
    def num_workers(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))


class CorpusEngine(ABC):
    def __init__(self, plan: CorpusBuildPlan, options: EngineOptions) -> None:
        self.plan, self.options, self.progress = plan, options, options.progress
        self.leads = options.member[0] == 0
        """Whether this engine sums up and commits; one engine of a job array does."""
        self.peak_rss_bytes = 0
        """Largest resident set of a worker, 0 if unknown."""
        self.cpu_seconds = 0.0
        """CPU time of the workers, 0 if unknown."""
        self.tasks_run = self.tasks_reused = 0

    @abstractmethod
    def run(self, step: PipelineStep, inputs: Mapping[str, Sequence[PortRows]]) -> dict[str, PortRows]:
        """Call the step for every bucket; returns one handle per port of the step."""

    @abstractmethod
    def collect(self, rows: PortRows) -> Iterator[Any]:
        """Fetch the rows of a small port to this process; ends the current chain (Beam runs its pipeline)."""

    def keep(self, *rows: PortRows) -> None:  # noqa: B027
        """Keep these handles usable after the next `collect`; by default all of them stay usable."""

    def close(self) -> None:  # noqa: B027
        """Release the workers."""


def open_engine(name: str, plan: CorpusBuildPlan, options: EngineOptions) -> CorpusEngine:
    if name == "local":
        from lakh.corpus.engines.local import LocalEngine

        return LocalEngine(plan, options)
    if name == "beam":
        from lakh.corpus.engines.beam import BeamEngine

        return BeamEngine(plan, options)
    if name == "spark":
        from lakh.corpus.engines.spark import SparkEngine

        return SparkEngine(plan, options)
    raise UserError(f"--engine {name}", "no such engine", f"choose one of: {', '.join(ENGINES)}")
