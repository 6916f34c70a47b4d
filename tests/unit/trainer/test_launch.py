"""What the end of a rank means is a pure decision."""

import pytest

from lakh.spec import Mesh, Run, Training
from lakh.trainer.launch import can_lose_ranks, judge

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
    verdict = judge(codes, stopping=False, restarts_left=1, may_lose=True)
    assert (verdict.action, verdict.rank) == (action, rank)


def test_only_whole_copies_over_c3_may_be_lost() -> None:
    def asked(ranks: int, backend: str = "c3", **mesh: int) -> tuple[bool, str]:
        return can_lose_ranks(Run(name="x", mesh=Mesh(**mesh), train=Training(backend=backend)), ranks)

    assert asked(2, dp_replicate=2)[0]
    assert "gloo" in asked(2, "gloo", dp_replicate=2)[1]
    assert "takes its part" in asked(4, dp_replicate=2)[1]
    assert not asked(1)[0]
