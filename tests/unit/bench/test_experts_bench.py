"""`lakh bench experts`: the losses of one process, and the bytes that the planner predicts."""

import pytest
from bench.train.experts import bench_experts


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bytes_and_losses_are_the_predicted_ones() -> None:
    (row,) = bench_experts(ranks=2, ep=2, backends=["gloo"], top_k=8, steps=2)
    assert row["sent_bytes"] == row["predicted_bytes"] > 0
    assert row["loss_gap"] < 2e-6
    assert row["step_ms"] > 0
