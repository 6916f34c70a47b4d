"""The memory that a build of a given size states, and that its steps keep to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakh.corpus.build_plan import BUCKET_TEXT_BYTES, MAX_BUCKETS
from lakh.corpus.build_size import BYTES_A_DOCUMENT, WORKER_BASE_BYTES, build_size
from lakh.corpus.build_steps import _drop_rows
from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.document import STREAM, complete
from lakh.corpus.settings import Settings

STEP_TIMEOUT_S = 300
SMALL_BUCKET = 20_000


def test_ten_terabytes_need_the_memory_of_one_bucket() -> None:
    size = build_size(10 * 10**12, 10 * 10**9, Settings())
    assert (size.splits, size.buckets, size.documents_a_bucket) == (2000, 37253, 268_435)
    assert size.worker_bytes == WORKER_BASE_BYTES + max(size.step_bytes.values())
    assert size.step_bytes["pairs"] > BYTES_A_DOCUMENT["pairs"] * size.documents_a_bucket
    tenth = build_size(10**12, 10**9, Settings())
    assert tenth.step_bytes["pairs"] == pytest.approx(size.step_bytes["pairs"], rel=0.01)


def test_memory_follows_the_settings() -> None:
    usual = build_size(10**12, 10**9, Settings())
    wider = build_size(10**12, 10**9, Settings(near=NearDedupSettings(threshold=0.5)))
    without = build_size(10**12, 10**9, Settings(near=NearDedupSettings(enabled=False)))
    assert wider.bands > usual.bands
    assert wider.worker_bytes > usual.worker_bytes
    assert "pairs" not in without.step_bytes


def test_a_build_beyond_the_most_buckets_says_so() -> None:
    size = build_size(2 * MAX_BUCKETS * BUCKET_TEXT_BYTES, 10**10, Settings())
    assert size.has_full_buckets
    assert "memory grows" in size.describe()
    assert not build_size(10**13, 10**10, Settings()).has_full_buckets


def test_plan_prints_the_same_numbers(lakh: Callable[..., Any], last_line: Callable[..., Any]) -> None:
    code, stdout, _ = lakh("corpus", "plan", "--text", "10TB", "--documents", "10G", "--json")
    assert code == 0
    assert last_line(stdout)["worker_bytes"] == build_size(10 * 10**12, 10 * 10**9, Settings()).worker_bytes


@pytest.mark.parametrize("text", ["ten", "0", "10XB", "-1"])
def test_a_wrong_size_is_explained(lakh: Callable[..., Any], text: str) -> None:
    code, _, stderr = lakh("corpus", "plan", "--text", text, "--documents", "10G")
    assert code == 2
    assert "write for example 10TB" in stderr


def test_rows_are_dropped_by_number_in_whatever_order_they_arrive() -> None:
    def drops(*rows: tuple[int, str]) -> pa.RecordBatch:
        columns = {"row": [row for row, _ in rows], "reason": [text for _, text in rows], "detail": ["d"] * len(rows)}
        return pa.record_batch(columns)

    apply = _drop_rows(iter([drops((7, "c"), (0, "a")), drops((4, "b"))]))
    reasons = []
    for first, size in ((0, 3), (3, 2), (5, 4)):
        rows = {"repo": ["r"] * size, "path": [f"{first + n}.py" for n in range(size)], "text": ["x = 1"] * size}
        batch = complete(pa.record_batch(rows))
        assert batch.schema.names == STREAM.names
        reasons += apply(batch).column("reason").to_pylist()
    assert reasons == ["a", "", "", "", "b", "", "", "c", ""]
    empty = _drop_rows(iter([]))(complete(pa.record_batch({"repo": ["r"], "path": ["p"], "text": ["t"]})))
    assert empty.column("reason").to_pylist() == [""]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["exact", "pairs"])
def test_a_step_takes_no_more_memory_than_stated(step: str) -> None:
    top = Path(__file__).parents[3]
    command = [sys.executable, "-m", "bench.corpus.step_memory", "--step", step, "--documents", str(SMALL_BUCKET), "0"]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=True)
    assert json.loads(done.stdout) < 2 * BYTES_A_DOCUMENT[step] * SMALL_BUCKET
