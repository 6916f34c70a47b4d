"""`lakh health drill` on real ranks."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]


@pytest.mark.parametrize("fault", ["kill", "row-remap-pending"])
def test_a_drill_reports_detection_and_recovery(fault: str, tiny_recipe: Path, run_lakh) -> None:
    steps = "train.steps=12" if fault == "kill" else "train.steps=300"  # it must still run when the agent is ready
    found = run_lakh("health", "drill", str(tiny_recipe), "--fault", fault, "--nproc", "1", "--set", steps)
    assert found.keys() == {
        "fault",
        "detect_s",
        "next_step_s",
        "restarts",
        "samples_lost",
        "samples_repeated",
        "loss_gap",
    }
    assert 0 <= found["detect_s"] < found["next_step_s"]
    assert found["restarts"] == (1 if fault == "kill" else 0)
    assert (found["samples_lost"], found["samples_repeated"]) == (0, 0)
    assert found["loss_gap"] < 1e-5
