"""Engines: who runs the steps of a build, and how rows travel between them.

A build is a chain of steps. A *step* is a plain function that an engine calls once per bucket with all rows of that
bucket, and that yields (port, rows) pairs; each row says in its BUCKET column where it goes next:

    function(plan, bucket, given, trail) -> Iterator[(port, RecordBatch)]

`given(port)` is the iterator of the bucket's rows from one of the step's inputs, in no particular order; `trail(n)`
tells that n more bytes of input are done (trail.py). Texts do not travel: steps put them into files of the work
folder, by split, so an exchange carries keys and verdicts only, on every engine.

    local   processes of this machine, files in the work folder         engines/local.py
    beam    an Apache Beam pipeline; the exchange is GroupByKey         engines/beam.py
    spark   mapInArrow on a Spark cluster; the exchange is its shuffle  engines/spark.py

A step may run twice (a lost worker, a speculative copy): it writes the same bytes under the same names, so it does not
matter. A result depends on the rows, never on their order, on the number of workers or on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    "PipelineStep",
    "PortRows",
    "StepFunction",
    "StepInputs",
    "open_engine",
]

StepInputs = Callable[[str], Iterator[Any]]
StepFunction = Callable[[CorpusBuildPlan, int, StepInputs, TaskProgress], Iterator[tuple[str, Any]]]
PortRows = Any
"""An engine's own handle of the rows of one port."""

ENGINES = ("local", "beam", "spark")
MEMBER_TIMEOUT_S = 6 * 3600.0
"""How long a member of an array waits for the others' part of a step."""
MEMBER_POLL_S = 2.0
MEMORY_PER_WORKER_BYTES = 1 << 30


@dataclass(frozen=True)
class PipelineStep:
    """One function, once per bucket."""

    name: str
    function: StepFunction
    """Importable by name: other processes and machines call it."""
    num_buckets: int
    ports: tuple[str, ...] = ()
    says: str = ""
    """What the progress bar calls it."""
    is_last: bool = False
    """Nobody but the leading engine waits for the end of the last step."""
    total_bytes: int = 0
    """What the ticks add up to; 0 where only finished buckets are counted."""


class CorpusEngine(Protocol):
    name: str
    leads: bool
    """Is it ours to sum up and commit? Of an array of engines, one leads."""
    peak_rss_bytes: int
    """Largest resident set of a worker, 0 where the engine cannot know."""
    cpu_seconds: float
    """CPU time of the workers, 0 where the engine cannot know."""
    tasks_run: int
    tasks_reused: int

    def run(self, step: PipelineStep, inputs: Mapping[str, Sequence[PortRows]]) -> dict[str, PortRows]:
        """Call the step for every bucket; the result has one handle per port of the step."""
        ...

    def collect(self, rows: PortRows) -> Iterator[Any]:
        """The rows of a port whose content is small, here; ends the current chain (Beam runs its pipeline)."""
        ...

    def keep(self, *rows: PortRows) -> None:
        """These handles are used after the next `collect`; others are not."""
        ...

    def close(self) -> None: ...


def open_engine(
    name: str,
    plan: CorpusBuildPlan,
    *,
    workers: int = 0,
    memory_bytes: int = MEMORY_PER_WORKER_BYTES,
    member: tuple[int, int] = (0, 1),
    options: Sequence[str] = (),
    progress: Progress | None = None,
) -> CorpusEngine:
    """The engine of that name; `options` are Beam's or Spark's own, `memory_bytes` is for each local worker."""
    if name == "local":
        from lakh.corpus.engines.local import LocalEngine

        return LocalEngine(plan, workers=workers, memory_bytes=memory_bytes, member=member, progress=progress)
    if name == "beam":
        from lakh.corpus.engines.beam import BeamEngine

        return BeamEngine(plan, options=options, workers=workers, progress=progress)
    if name == "spark":
        from lakh.corpus.engines.spark import SparkEngine

        return SparkEngine(plan, options=options, workers=workers, progress=progress)
    raise UserError(f"--engine {name}", "no such engine", f"choose one of: {', '.join(ENGINES)}")
