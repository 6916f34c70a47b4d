"""lakh bench checkpoint gives one row for each system and mode, and exact checkpoints resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.checkpoint.command import bench_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_system_and_mode_has_a_row(tmp_path: Path) -> None:
    rows, facts = bench_checkpoint(
        tmp_path,
        width=64,
        layers=1,
        warm_up=3,
        gap=2,
        resume=2,
        orders=2,
        batch=2,
        sequence=16,
        repeats=1,
        device="cpu",
        progress=lambda text: None,
    )
    by_mode = {(row["system"], row["mode"]): row for row in rows}
    assert set(by_mode) == {
        ("lakh", "full"),
        ("lakh", "exact"),
        ("lakh", "bounded"),
        ("lakh", "factored"),
        ("lakh", "weights"),
        ("torch DCP", "full"),
        ("noise", "1e-06"),
    }
    fields = {"bytes", "raw_bytes", "stall_s", "write_s", "restore_s", "restored_loss_gap", "resumed_loss_gap"}
    assert all(fields <= row.keys() for row in rows)
    assert facts["parameters"] * 12 <= by_mode["lakh", "full"]["raw_bytes"]
    for exact in (("lakh", "full"), ("lakh", "exact"), ("torch DCP", "full")):
        assert by_mode[exact]["restored_loss_gap"] == by_mode[exact]["resumed_loss_gap"] == 0
        assert by_mode[exact]["spread"] == 0
    assert 0 < abs(by_mode["noise", "1e-06"]["resumed_loss_gap"]) < 1e-3
    assert by_mode["lakh", "weights"]["resumed_loss_gap"] is None
    assert (
        by_mode["lakh", "factored"]["bytes"] < by_mode["lakh", "bounded"]["bytes"] < by_mode["lakh", "exact"]["bytes"]
    )
