"""Where Arrow's 32-bit offsets end, and how a large build is divided."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lakh.corpus.build_plan import MAX_BUCKETS, count_buckets
from lakh.corpus.dedup.nodes import keep_smallest
from lakh.corpus.dedup.steps import _table, _with_bucket
from lakh.corpus.document import one_batch
from lakh.corpus.engines.exchange import BUCKET, split_rows

CHUNK_ROWS, NUM_CHUNKS = 256, 9
ROW_BYTES = 1 << 20  # 9 chunks of 256 rows are 2.25 GiB


def chunks() -> list[pa.RecordBatch]:
    """Batches that share one buffer of 256 MiB, so that the input itself is small."""
    values = pa.array([b"x" * ROW_BYTES] * CHUNK_ROWS, pa.binary())
    made = []
    for number in range(NUM_CHUNKS):
        nodes = [f"{number:04d}-{row:04d}" for row in range(CHUNK_ROWS)]
        made.append(pa.record_batch({"node": pa.array(nodes, pa.string()), "sketch": values}))
    return made


@pytest.mark.slow
def test_no_row_is_lost_past_2_gib() -> None:
    rows = _table(iter(chunks()))
    batch = _with_bucket(rows, "node", 3)
    assert batch.num_rows == CHUNK_ROWS * NUM_CHUNKS
    assert batch.nbytes > 2 << 30
    nodes = [node for _, part in split_rows(batch.select(["node", BUCKET])) for node in part.column("node").to_pylist()]
    assert sorted(nodes) == sorted(rows.column("node").to_pylist())
    winners, losers = keep_smallest(rows, "node")
    assert (winners.num_rows, losers.num_rows) == (CHUNK_ROWS * NUM_CHUNKS, 0)


@pytest.mark.slow
def test_a_table_that_does_not_fit_is_an_error_and_never_a_part_of_it() -> None:
    with pytest.raises(AssertionError, match="2,304 rows do not fit"):
        one_batch(pa.Table.from_batches(chunks()))


def test_buckets_follow_the_splits_of_small_builds_and_the_bytes_of_large_ones() -> None:
    assert count_buckets(1, 10_000) == 1
    assert count_buckets(40, 40 * 64 << 20) == 10
    assert count_buckets(2000, 10 * 10**12) == 37253  # 10 TB: 256 MiB of text each
    assert count_buckets(2000, 10**16) == MAX_BUCKETS
