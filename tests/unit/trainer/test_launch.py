"""The launcher's decision from the exit codes of the ranks is a pure function."""

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
def test_the_rank_that_failed_first_decides_the_action(codes: tuple[int | None, ...], action: str, rank: int) -> None:
    decision = decide(codes, stopping=False, restarts_left=1)
    assert (decision.action, decision.rank) == (action, rank)
    if action in ("restart", "fail"):
        assert f"rank {rank} " in decision.reason


def test_without_restarts_left_a_dead_rank_fails_the_run() -> None:
    decision = decide((75, -9), stopping=False, restarts_left=0)
    assert decision.action == "fail"
    assert "SIGKILL and no restarts are left" in decision.reason


def test_the_launcher_waits_for_ranks_that_stop_on_request() -> None:
    assert decide((75, None), stopping=True, restarts_left=3).action == "wait"
    assert decide((75, 75), stopping=True, restarts_left=3).action == "stopped"
    assert decide((0, 0), stopping=True, restarts_left=3).action == "done"


@pytest.mark.parametrize(
    ("codes", "action", "rank"),
    [
        ((None, -9), "wait", 1),  # the other continues
        ((-9, 0), "done", 1),  # and its answer is the run's
        ((75, 0, -9), "done", 1),
        ((75, -9), "restart", 1),  # no rank is left
        ((2, None, 75), "fail", 0),
        ((0, 0), "done", 0),
    ],
)
def test_an_elastic_run_continues_without_lost_ranks(codes, action: str, rank: int) -> None:
    decision = decide(codes, stopping=False, restarts_left=1, elastic=True)
    assert (decision.action, decision.rank) == (action, rank)


def test_ranks_can_be_lost_only_if_each_holds_the_model_and_uses_c3() -> None:
    def asked(ranks: int, backend: str = "c3", **mesh: int) -> tuple[bool, str]:
        return can_continue_without_ranks(Training(backend=backend), Mesh(**mesh), ranks)

    assert asked(2, dp_replicate=2)[0]
    assert "gloo" in asked(2, "gloo", dp_replicate=2)[1]
    assert "takes its part" in asked(4, dp_replicate=2)[1]
    assert not asked(1)[0]
