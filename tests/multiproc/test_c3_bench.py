"""The benchmarks of c3 run beside Gloo and a real MPI."""

import pytest
from bench.comm.collectives import CommSweep, bench_collectives, uneven_splits
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
    ops = ("all_reduce", "all_to_all_v")
    sweep = CommSweep(backends=("c3", "gloo", "mpi"), ops=ops, sizes=(1 << 10,), repeats=3, timeout_s=150)
    rows = bench_collectives(sweep)["rows"]
    found = [(row["op"], row["backend"]) for row in rows]
    assert found == [
        (op, backend) for op in ops for backend in (("c3", "gloo", "mpi") if op == ops[0] else ("c3", "gloo"))
    ]
    assert all(row["median_us"] > 0 for row in rows)


def test_uneven_parts_add_up_to_what_a_rank_sends() -> None:
    for ranks in (1, 2, 5):
        splits = uneven_splits(1000, ranks)
        assert [sum(row) for row in splits] == [1000] * ranks
        assert all(part >= 0 for row in splits for part in row)
    assert len(set(uneven_splits(1000, 4)[0])) > 1
