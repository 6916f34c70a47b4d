"""What the end of a rank means is a pure decision."""

import pytest

from lakh.spec import Mesh, Training
from lakh.trainer.launch.launcher import can_continue_without_ranks, decide

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
    decision = decide(codes, stopping=False, restarts_left=1)
    assert (decision.action, decision.rank) == (action, rank)
    if action in ("restart", "fail"):
        assert f"rank {rank} " in decision.reason


def test_without_restarts_left_a_death_is_the_end() -> None:
    decision = decide((75, -9), stopping=False, restarts_left=0)
    assert decision.action == "fail"
    assert "SIGKILL and no restarts are left" in decision.reason


def test_the_launcher_waits_for_a_run_that_stops() -> None:
    assert decide((75, None), stopping=True, restarts_left=3).action == "wait"
    assert decide((75, 75), stopping=True, restarts_left=3).action == "stopped"
    assert decide((0, 0), stopping=True, restarts_left=3).action == "done"


@pytest.mark.parametrize(
    ("codes", "action", "rank"),
    [
        ((None, -9), "wait", 1),  # the other goes on
        ((-9, 0), "done", 1),  # and its answer is the run's
        ((75, 0, -9), "done", 1),
        ((75, -9), "restart", 1),  # nobody is left
        ((2, None, 75), "fail", 0),
        ((0, 0), "done", 0),
    ],
)
def test_where_ranks_may_be_lost_the_others_are_waited_for(codes, action: str, rank: int) -> None:
    decision = decide(codes, stopping=False, restarts_left=1, elastic=True)
    assert (decision.action, decision.rank) == (action, rank)


def test_only_whole_copies_over_c3_may_be_lost() -> None:
    def asked(ranks: int, backend: str = "c3", **mesh: int) -> tuple[bool, str]:
        return can_continue_without_ranks(Training(backend=backend), Mesh(**mesh), ranks)

    assert asked(2, dp_replicate=2)[0]
    assert "gloo" in asked(2, "gloo", dp_replicate=2)[1]
    assert "takes its part" in asked(4, dp_replicate=2)[1]
    assert not asked(1)[0]
