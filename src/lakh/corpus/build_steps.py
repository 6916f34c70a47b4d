"""The steps of a build, in their order: the same for every engine.

    read       split  -> files become documents and pass the first filters; texts go to the spool, keys to the exchange
    ...               -> deduplication (dedup/steps.py)
    finish     split  -> the duplicates are dropped; the rest passes the other filters, is ordered and written

`read` and `finish` write files whose names and bytes depend on the split only: a step may run twice, anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakh import storage
from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.dedup.nodes import EARLIER
from lakh.corpus.dedup.steps import deduplicate, document_keys
from lakh.corpus.document import STREAM, Filter, complete, drop, rows_of
from lakh.corpus.engines import CorpusEngine, PipelineStep, StepInputs, StepOutput
from lakh.corpus.engines.exchange import BUCKET
from lakh.corpus.filters import filters_after_dedup, filters_before_dedup
from lakh.corpus.filters.chain import apply_filters
from lakh.corpus.parsing.import_order import in_import_order
from lakh.corpus.parsing.read_files import read_files
from lakh.corpus.parsing.text_features import text_features_filter
from lakh.corpus.secrets import redaction
from lakh.corpus.shards import create_shard, read_rows
from lakh.corpus.task_progress import TaskProgress
from lakh.corpus.writer import CorpusCounts, write_split

__all__ = ["run_steps"]

RESUME = "run the same command again"
COMBINED_BATCHES = 1024
"""Dropped rows arrive in batches of a few rows, each of which takes some KB."""


def run_steps(engine: CorpusEngine, plan: CorpusBuildPlan) -> CorpusCounts | None:
    """Run the whole build; returns its counts, or None if another member of a job array sums up."""
    size, num_read = plan.survey.code_bytes, plan.num_splits + len(plan.earlier)
    reading = PipelineStep("read", read, num_read, ("keys", "sketches"), "reading", total_bytes=size)
    ports = engine.run(reading, {})
    drops = deduplicate(engine, plan, ports["keys"], ports["sketches"])
    finishing = PipelineStep("finish", finish, plan.num_splits, ("counts",), "writing", is_last=True, total_bytes=size)
    counts = engine.run(finishing, {"drops": drops})["counts"]
    if not engine.leads:
        return None
    total = CorpusCounts()
    for batch in engine.collect(counts):
        for (text,) in rows_of(batch, "counts"):
            total.add(CorpusCounts.from_json(text))
    total.files.sort(key=lambda entry: str(entry["file"]))
    return total


def read(plan: CorpusBuildPlan, split: int, inputs: StepInputs, task: TaskProgress) -> StepOutput:
    """Read the files of a split, apply the first filters, write the spool, yield keys for deduplication."""
    settings, row = plan.settings, 0
    features = text_features_filter(settings.near)
    if split >= plan.num_splits:
        # Documents of an earlier corpus take part in every comparison, and win it.
        for rows in read_rows(plan.earlier[split - plan.num_splits]):
            yield from document_keys(features(complete(rows)), EARLIER, 0, plan.num_buckets)
        return
    filters = [*filters_before_dedup(settings), features]
    batches = read_files(plan.listing(split), settings.filters, dropped_texts=settings.dropped_texts, task=task)
    with create_shard(plan.work, plan.spool_name(split), STREAM) as spool:
        for batch in apply_filters(batches, filters, task, keep_text=settings.dropped_texts):
            spool.write(batch)
            yield from document_keys(batch, split, row, plan.num_buckets)
            row += batch.num_rows
            task.advance(pc.sum(batch.column("size_bytes")).as_py())


def finish(plan: CorpusBuildPlan, split: int, inputs: StepInputs, task: TaskProgress) -> StepOutput:
    """Apply what deduplication dropped, apply the remaining filters, redact secrets, order and write the shard."""
    settings = replace(plan.settings, decontaminate=plan.decontamination)
    keep_text = settings.dropped_texts
    spool = read_rows(storage.join(plan.work, plan.spool_name(split)), remedy=RESUME)
    with write_split(plan.out, split) as writer:
        redact = redaction(settings.secrets)
        filters = [*filters_after_dedup(settings), lambda batch: writer.sample_redactions(batch, redact(batch))]
        left = apply_filters(spool, [_drop_rows(inputs("drops"))], TaskProgress(), keep_text=keep_text)
        for batch in in_import_order(apply_filters(left, filters, task, keep_text=keep_text)):
            writer.write(batch)
            task.advance(pc.sum(batch.column("size_bytes")).as_py())
    yield "counts", pa.record_batch({BUCKET: pa.array([0], pa.int32()), "counts": [writer.counts.to_json()]})


def _drop_rows(drops: Iterator[Any]) -> Filter:
    """A filter for the batches of a split in their order, which drops rows by number.

    The rows stay in Arrow until their batch comes: a split of a large build has millions of them.
    """
    tables: list[Any] = []
    waiting: list[Any] = []
    for batch in drops:
        waiting.append(batch)
        if len(waiting) == COMBINED_BATCHES:
            tables.append(pa.Table.from_batches(waiting).combine_chunks())
            waiting.clear()
    tables += [pa.Table.from_batches(waiting)] if waiting else []
    found = pa.concat_tables(tables).combine_chunks() if tables else None
    rows = np.asarray(found.column("row")) if found is not None else np.empty(0, np.int64)
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = 0

    def apply(batch: Any) -> Any:
        nonlocal first
        begin, end = np.searchsorted(rows, [first, first + batch.num_rows])
        reasons, details = [""] * batch.num_rows, [""] * batch.num_rows
        if found is not None and begin < end:
            for row, reason, detail in rows_of(found.take(pa.array(order[begin:end])), "row", "reason", "detail"):
                reasons[row - first], details[row - first] = reason, detail
        first += batch.num_rows
        return drop(batch, reasons, details)

    return apply
