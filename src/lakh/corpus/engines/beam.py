"""A build as Apache Beam pipelines: a step is a ParDo after a GroupByKey.

Texts do not pass through Beam; its workers read and write them in the work folder, which all of them must see (a shared
disk, or a URL such as s3://). Steps chain lazily into one pipeline. When the build needs a result before it can
continue (the number of near duplicates, convergence), the pipeline runs, and what is needed later goes to files from
which the next pipeline starts.

Tested: the in-memory and multi_processing modes of the DirectRunner. Other runners (Dataflow, Flink) through Beam's own
options, untested: `--engine-option=--runner=DataflowRunner ...`.

Fails with the step's own error if the runner passes it on; else PeerLost with the runner's message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions

from lakh import storage
from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.engines import CorpusEngine, EngineOptions, PipelineStep, PortRows
from lakh.corpus.engines.cluster import START, call_step, count_tasks, runner_failed
from lakh.corpus.engines.exchange import decode, encode
from lakh.errors import LakhError, PeerLost

__all__ = ["BeamEngine"]

IN_MEMORY = "apache_beam.runners.portability.fn_api_runner.fn_runner.FnApiRunner"
ENDING = ".arrows"


@dataclass
class BeamRows:
    """Payloads of one port: a collection of the open pipeline, or files of an earlier pipeline."""

    port: str
    collection: Any = None
    files: tuple[str, ...] | None = None


class BeamEngine(CorpusEngine):
    def __init__(self, plan: CorpusBuildPlan, options: EngineOptions) -> None:
        super().__init__(plan, options)
        self._kept: list[BeamRows] = []
        self._runs = 0
        self._open()

    def run(self, step: PipelineStep, inputs: Mapping[str, Sequence[PortRows]]) -> dict[str, PortRows]:
        label = f"{step.name}-{self._runs}"
        buckets = range(step.num_buckets)
        arriving = [self._pipeline | f"{label} buckets" >> beam.Create([(bucket, (START, b"")) for bucket in buckets])]
        for port, sources in inputs.items():
            for number, rows in enumerate(sources):
                payloads = self._payloads(rows, f"{label} {port} {number}")
                arriving.append(payloads | f"{label} as {port} {number}" >> beam.Map(_to_bucket, port))
        made = (
            tuple(arriving)
            | f"{label} together" >> beam.Flatten()
            | f"{label} by bucket" >> beam.GroupByKey()
            | f"{label}" >> beam.ParDo(_CallStep(self.plan, step)).with_outputs(*step.ports)
        )
        num_new, num_reused = count_tasks(self.plan, step)
        self.tasks_run += num_new
        self.tasks_reused += num_reused
        if self.progress and step.total_bytes == 0:
            self.progress(step.activity, 0, step.num_buckets)
        return {port: BeamRows(port, made[port]) for port in step.ports}

    def collect(self, rows: PortRows) -> Iterator[Any]:
        self._run_pipeline([rows, *self._kept])
        for file in rows.files or ():
            for _, content in _read_bucket(file):
                yield from decode(content)

    def keep(self, *rows: PortRows) -> None:
        self._kept += [item for item in rows if item not in self._kept]

    def _open(self) -> None:
        options = PipelineOptions(list(self.options.framework) or _direct_options(self.options.num_workers))
        options.view_as(SetupOptions).save_main_session = False
        self._pipeline = beam.Pipeline(options=options)

    def _payloads(self, rows: BeamRows, label: str) -> Any:
        if rows.files is None:
            return rows.collection
        files = self._pipeline | f"{label} files" >> beam.Create(list(rows.files))
        return files | f"{label} shuffled" >> beam.Reshuffle() | f"{label} read" >> beam.FlatMap(_read_bucket)

    def _run_pipeline(self, wanted: Sequence[BeamRows]) -> None:
        """Run the pipeline and write the wanted ports to files."""
        folder = storage.join(self.plan.work, f"beam-{self._runs:03d}")
        unwritten = [(f"{at:02d}-{rows.port}", rows) for at, rows in enumerate(wanted) if rows.files is None]
        for name, rows in unwritten:
            grouped = rows.collection | f"keep {name} by bucket" >> beam.GroupByKey()
            grouped | f"keep {name}" >> beam.Map(_write_bucket, storage.join(folder, name))
        try:
            state = self._pipeline.run().wait_until_finish()
        except LakhError:
            raise
        except Exception as error:
            raise _step_error(error) or runner_failed("beam", error, -1) from error
        if str(state) != "DONE":
            raise PeerLost("beam", f"the pipeline ended in the state {state}", "look at the runner's own log")
        for name, rows in unwritten:
            url = storage.join(folder, name)
            rows.files = tuple(storage.join(url, file) for file in storage.list_dir(url) if file.endswith(ENDING))
            rows.collection = None
        self._runs += 1
        self._open()


class _CallStep(beam.DoFn):
    def __init__(self, plan: CorpusBuildPlan, step: PipelineStep) -> None:
        self.plan, self.step = plan, step

    def process(self, element: tuple[int, Iterable[tuple[str, bytes]]]) -> Iterator[Any]:
        bucket, arrived = element
        for port, target, content in call_step(self.plan, self.step, bucket, arrived):
            yield beam.pvalue.TaggedOutput(port, (target, content))


def _write_bucket(group: tuple[int, Iterable[bytes]], folder: str) -> None:
    """Write one file per bucket, atomically, the same bytes each time."""
    bucket, contents = group
    rows = pa.record_batch({"payload": pa.array(sorted(contents), pa.binary())})
    storage.write_bytes(storage.join(folder, f"bucket-{bucket:05d}{ENDING}"), encode([rows]))


def _read_bucket(url: str) -> Iterator[tuple[int, bytes]]:
    bucket = int(url.removesuffix(ENDING).rpartition("-")[2])
    for rows in decode(storage.read_bytes(url)):
        for content in rows.column("payload").to_pylist():
            yield bucket, content


def _to_bucket(payload: tuple[int, bytes], port: str) -> tuple[int, tuple[str, bytes]]:
    bucket, content = payload
    return bucket, (port, content)


def _direct_options(processes: int) -> list[str]:
    """Options to run on this machine in one or several processes."""
    if processes == 1:
        return [f"--runner={IN_MEMORY}"]
    return ["--runner=DirectRunner", "--direct_running_mode=multi_processing", f"--direct_num_workers={processes}"]


def _step_error(error: BaseException) -> LakhError | None:
    """The step's own error, if the runner has passed it on."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, LakhError):
        seen = seen.__cause__ or seen.__context__
    return seen
