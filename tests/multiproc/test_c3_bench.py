"""The benchmark of a training step trains with equal losses over both backends."""

import pytest
from bench.comm.fsdp import bench_fsdp


@pytest.mark.timeout(300)
def test_an_fsdp2_step_is_timed_over_c3_and_gloo() -> None:
    rows = bench_fsdp(ranks=2, steps=5, batch=1, length=8, blocks=1, registered=True, timeout_s=240)
    assert [row["registered"] for row in rows] == [True, False]
    assert [row["backend"] for row in rows] == ["c3", "gloo"]
    assert rows[0]["last_loss"] == pytest.approx(rows[1]["last_loss"], rel=1e-4)
    assert rows[1]["ratio_to_gloo"] == 1
    assert all(row["median_ms"] >= row["min_ms"] > 0 for row in rows)
