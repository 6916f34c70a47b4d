"""Run filters over a stream of record batches, and isolate documents that crash their worker process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import Filter, drop, one_batch, with_columns
from lakh.corpus.task_progress import TASK_ATTEMPTS, TaskProgress

__all__ = ["apply_filters"]


def apply_filters(
    batches: Iterator[Any], filters: Sequence[Filter], task: TaskProgress, *, keep_text: bool
) -> Iterator[Any]:
    """The batches after all filters. With `keep_text`, the text of a dropped document moves to `dropped_text`.

    A task that has lost a worker filters one document at a time and marks its progress before each, so the document
    that crashes the process can be identified and skipped. The result has the same rows in the same batches.
    """
    number = 0
    for batch in batches:
        if task.one_at_a_time:
            yield _one_at_a_time(batch, number, filters, task, keep_text)
        else:
            yield _apply(batch, filters, keep_text)
        number += batch.num_rows


def _apply(batch: Any, filters: Sequence[Filter], keep_text: bool) -> Any:
    for apply in filters:
        before, batch = batch, apply(batch)
        if keep_text:
            fresh = pc.and_(pc.equal(before.column("reason"), ""), pc.not_equal(batch.column("reason"), ""))
            texts = pc.if_else(fresh, before.column("text"), batch.column("dropped_text"))
            batch = with_columns(batch, dropped_text=texts)
    return batch


def _one_at_a_time(batch: Any, first: int, filters: Sequence[Filter], task: TaskProgress, keep_text: bool) -> Any:
    done = []
    for row in range(batch.num_rows):
        single = batch.slice(row, 1)
        if not single.column("reason")[0].as_py():  # filters ignore dropped documents
            place = f"{single.column('repo')[0]}/{single.column('path')[0]} row {first + row}"
            if task.skips(place):
                single = drop(single, ["crashed"], [f"its worker died {TASK_ATTEMPTS} times"])
            else:
                task.mark(place)
                single = _apply(single, filters, keep_text)
        done.append(single)
    task.mark("")
    return one_batch(pa.Table.from_batches(done, schema=batch.schema))
