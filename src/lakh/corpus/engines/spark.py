"""A build on a Spark cluster: a step is mapInArrow after a shuffle by bucket.

Every row that Spark sees is (port, bucket, Arrow bytes); it shuffles by bucket, and each Spark partition calls the
step once per bucket. Texts do not pass through Spark; its workers read and write them in the work folder, which all of
them must see (a shared disk, or a URL such as s3://).

    --engine-option master=spark://host:7077      any of Spark's own settings as key=value

The default master is local[N]. The output of a step is persisted on Spark's disks, so that no step runs twice for two
readers.

Fails with the step's own error if Spark passes it on; else PeerLost with Spark's message.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakh import errors
from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.document import rows_of
from lakh.corpus.engines import CorpusEngine, EngineOptions, PipelineStep, PortRows
from lakh.corpus.engines.cluster import START, call_step, count_tasks, runner_failed
from lakh.corpus.engines.exchange import decode
from lakh.errors import LakhError, PeerLost, UserError

__all__ = ["SparkEngine"]

SCHEMA = "port string, bucket int, content binary"
ARROW = pa.schema([("port", pa.string()), ("bucket", pa.int32()), ("content", pa.binary())])
STEP_ERROR = re.compile(r"lakh-error:(\{.*?\})(?:\n|$)", re.DOTALL)


@dataclass(frozen=True)
class SparkRows:
    frame: Any
    port: str


class SparkEngine(CorpusEngine):
    def __init__(self, plan: CorpusBuildPlan, options: EngineOptions) -> None:
        super().__init__(plan, options)
        self._frames: list[DataFrame] = []
        self._session = _session(options.framework, options.num_workers)

    def run(self, step: PipelineStep, inputs: Mapping[str, Sequence[PortRows]]) -> dict[str, PortRows]:
        frame = self._session.createDataFrame(
            [(START, bucket, b"") for bucket in range(step.num_buckets)], schema=SCHEMA
        )
        for port, sources in inputs.items():
            for rows in sources:
                chosen = rows.frame.filter(F.col("port") == rows.port)
                frame = frame.unionByName(chosen.withColumn("port", F.lit(port)))
        plan = self.plan

        def call(batches: Iterator[Any]) -> Iterator[Any]:
            for bucket, arrived in _buckets(batches):
                yield from _called(plan, step, bucket, arrived)

        # One Spark partition for each bucket: a hash of the bucket would leave a third of them empty.
        shuffled = frame.repartitionById(step.num_buckets, "bucket")
        made = shuffled.mapInArrow(call, schema=SCHEMA).persist(StorageLevel.DISK_ONLY)
        self._frames.append(made)
        num_new, num_reused = count_tasks(self.plan, step)
        self.tasks_run += num_new
        self.tasks_reused += num_reused
        if self.progress:
            self._act(made.count)  # run now, so that the progress is correct
            self.progress(step.activity, step.num_buckets, step.num_buckets)
        return {port: SparkRows(made, port) for port in step.ports}

    def collect(self, rows: PortRows) -> Iterator[Any]:
        chosen = rows.frame.filter(F.col("port") == rows.port).select("content")
        for row in self._act(chosen.collect):
            yield from decode(bytes(row["content"]))

    def close(self) -> None:
        for frame in self._frames:
            frame.unpersist()
        self._session.stop()

    @staticmethod
    def _act(action: Any) -> Any:
        try:
            return action()
        except PySparkException as error:
            raise _step_error(error) or runner_failed("spark", error, 0) from error


def _buckets(batches: Iterator[Any]) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """(bucket, its payloads) from rows that are sorted by bucket."""
    rows = (row for batch in batches for row in rows_of(batch, "bucket", "port", "content"))
    for bucket, group in itertools.groupby(rows, key=lambda row: row[0]):
        yield bucket, [(port, content) for _, port, content in group]


def _called(plan: CorpusBuildPlan, step: PipelineStep, bucket: int, arrived: list[tuple[str, bytes]]) -> Iterator[Any]:
    try:
        for port, target, content in call_step(plan, step, bucket, arrived):
            columns = [pa.array([port]), pa.array([target], pa.int32()), pa.array([content], pa.binary())]
            yield pa.record_batch(columns, schema=ARROW)
    except LakhError as error:
        raise RuntimeError(f"lakh-error:{json.dumps(error.as_dict())}") from error


def _step_error(error: Exception) -> LakhError | None:
    """The step's own error, which travels in the message of a Spark exception."""
    found = STEP_ERROR.search(str(error))
    try:
        return errors.from_dict(json.loads(found[1])) if found else None
    except ValueError:
        return None


def _session(options: Sequence[str], workers: int) -> SparkSession:
    settings = {
        "spark.app.name": "lakh corpus",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "64",  # payloads are large: few at a time
        "spark.sql.adaptive.enabled": "false",  # it would merge partitions, and with them the memory of their buckets
        "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
    }
    for option in options:
        key, sign, value = option.partition("=")
        if not sign:
            raise UserError(
                f"--engine-option {option}", "is not key=value", "write for example master=spark://host:7077"
            )
        settings["spark.master" if key == "master" else key] = value
    settings.setdefault("spark.master", f"local[{workers}]")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        raise PeerLost(
            "spark", f"no session: {str(error).splitlines()[0][:300]}", "check java and the master's URL"
        ) from error
