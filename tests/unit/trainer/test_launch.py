"""What the end of a rank means is a pure decision."""

import pytest

from lakh.trainer.launch import judge

CASES = [
    ((None, None), "wait", 0),
    ((0, None), "wait", 0),
    ((0, 0), "done", 0),
    ((None, -9), "restart", 1),
    ((75, -9), "restart", 1),  # the survivor lost its peer: the dead one is the cause
    ((75, None), "restart", 0),
    ((75, 2), "fail", 1),  # a wrong setting would be wrong again
    ((65, 75), "fail", 0),
    ((1, 75), "fail", 0),
]


@pytest.mark.parametrize(("codes", "action", "rank"), CASES)
def test_the_cause_is_found_and_judged(codes: tuple[int | None, ...], action: str, rank: int) -> None:
    verdict = judge(codes, stopping=False, restarts_left=1)
    assert (verdict.action, verdict.rank) == (action, rank)
    if action in ("restart", "fail"):
        assert f"rank {rank} " in verdict.reason


def test_without_restarts_left_a_death_is_the_end() -> None:
    verdict = judge((75, -9), stopping=False, restarts_left=0)
    assert verdict.action == "fail"
    assert "SIGKILL and no restarts are left" in verdict.reason


def test_a_run_that_was_asked_to_stop_is_waited_for() -> None:
    assert judge((75, None), stopping=True, restarts_left=3).action == "wait"
    assert judge((75, 75), stopping=True, restarts_left=3).action == "stopped"
    assert judge((0, 0), stopping=True, restarts_left=3).action == "done"
