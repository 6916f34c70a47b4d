"""The files of a repository in the order of their imports, within a stream: what is used comes before who uses it.

Rows of one repository stand together in a split. They are held until the repository ends, or until WINDOW_BYTES of
text have gathered: a repository larger than that, or than a split, is ordered piece by piece. Dropped rows pass at
once. Runs last: the number of a row means nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.parsing.import_order import SourceFile, order_files

__all__ = ["in_import_order"]

WINDOW_BYTES = 32 << 20


def in_import_order(batches: Iterator[Any]) -> Iterator[Any]:
    """The same rows; kept ones ordered within their repository."""
    held: list[Any] = []
    size, repo = 0, ""
    for batch in batches:
        is_kept = pc.equal(batch.column("reason"), "")
        dropped = batch.filter(pc.invert(is_kept))
        if dropped.num_rows:
            yield dropped
        for rows in _by_repo(batch.filter(is_kept)):
            if held and (rows.column("repo")[0].as_py() != repo or size >= WINDOW_BYTES):
                yield from _ordered(held)
                held, size = [], 0
            repo = rows.column("repo")[0].as_py()
            held.append(rows)
            size += pc.sum(pc.binary_length(rows.column("text"))).as_py()
    if held:
        yield from _ordered(held)


def _by_repo(batch: Any) -> Iterator[Any]:
    """Stretches of rows of one repository."""
    repos = batch.column("repo").to_pylist()
    start = 0
    for row in range(1, len(repos) + 1):
        if row == len(repos) or repos[row] != repos[start]:
            yield batch.slice(start, row - start)
            start = row


def _ordered(held: list[Any]) -> Iterator[Any]:
    rows = pa.Table.from_batches(held).combine_chunks()
    columns = (rows.column(name).to_pylist() for name in ("path", "language", "text"))
    positions = order_files([SourceFile(*values) for values in zip(*columns, strict=True)])
    yield from rows.take(pa.array(positions, pa.int64())).combine_chunks().to_batches()
