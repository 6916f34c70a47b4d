"""The benchmarks of c3 run beside Gloo and a real MPI."""

import pytest
from bench.comm.collectives import CommSweep, bench_collectives
from bench.comm.fsdp import bench_fsdp


@pytest.mark.timeout(300)
def test_an_fsdp2_step_is_timed_over_c3_and_gloo() -> None:
    rows = bench_fsdp(ranks=2, steps=5, batch=1, length=8, blocks=1, registered=True, timeout_s=240)
    assert [row["registered"] for row in rows] == [True, False]
    assert [row["backend"] for row in rows] == ["c3", "gloo"]
    assert rows[0]["last_loss"] == pytest.approx(rows[1]["last_loss"], rel=1e-4)
    assert rows[1]["ratio_to_gloo"] == 1
    assert all(row["median_ms"] >= row["min_ms"] > 0 for row in rows)


@pytest.mark.timeout(200)
def test_collectives_are_timed_over_c3_gloo_and_mpi() -> None:
    pytest.importorskip("mpi4py", reason="pip install mpi4py mpich")
    sweep = CommSweep(backends=("c3", "gloo", "mpi"), sizes=(1 << 10,), repeats=3, timeout_s=150)
    rows = bench_collectives(sweep)["rows"]
    assert [row["backend"] for row in rows] == ["c3", "gloo", "mpi"]
    assert all(row["median_us"] > 0 for row in rows)
