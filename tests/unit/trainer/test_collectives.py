"""Compute time outside of collectives, the slowest rank, and the ranks that did not enter a collective."""

from pathlib import Path

import pytest

from lakh.trainer.observability.collective_records import describe_missing, find_absent
from lakh.trainer.observability.collectives import CollectiveBoard, CollectiveClock
from lakh.trainer.observability.step_metrics import straggler_seconds


class FakeGroup:
    """A group that torch does not know: of all ranks."""


def test_the_board_names_the_rank_that_did_not_enter_the_collective(tmp_path: Path) -> None:
    group = FakeGroup()
    boards = [CollectiveBoard(tmp_path / "board", rank, 3) for rank in range(3)]
    for board in boards:
        board.enter(group, "allgather")
    assert boards[0].missing() == ""
    boards[0].enter(group, "allreduce")
    boards[2].enter(group, "allreduce")
    assert boards[0].missing() == "rank 1 did not enter allreduce number 2 (its last was 1)"
    assert find_absent(tmp_path / "board") == boards[0].missing()
    boards[1].enter(group, "allreduce")
    assert boards[0].missing() == ""


def test_the_launcher_finds_ranks_that_are_behind_or_entered_nothing(tmp_path: Path) -> None:
    group = FakeGroup()
    boards = [CollectiveBoard(tmp_path / "board", rank, 3) for rank in range(3)]
    for rank, count in ((0, 5), (1, 2)):  # ranks enqueue ahead on a GPU
        for _ in range(count):
            boards[rank].enter(group, "allreduce")
    assert find_absent(tmp_path / "board").split("; ") == [
        "rank 1 did not enter allreduce number 5 (its last was 2)",
        "rank 2 did not enter allreduce number 5 (its last was 0)",
    ]
    assert find_absent(tmp_path / "none") == ""


def test_many_missing_ranks_are_counted() -> None:
    text = describe_missing("allreduce", 7, dict.fromkeys(range(10), 6) | {10: 7})
    assert text.startswith("rank 0 did not enter allreduce number 7 (its last was 6); rank 1")
    assert text.endswith("; and 6 more ranks")


def test_compute_time_leaves_out_collectives() -> None:
    now = [100.0]
    clock = CollectiveClock(clock=lambda: now[0])

    class SlowGroup:
        def allreduce(self) -> None:
            now[0] += 3.0
            self.broadcast()  # a method that calls another is one collective

        def broadcast(self) -> None:
            now[0] += 1.0

    clock._wrap(SlowGroup, "allreduce", "allreduce")
    clock._wrap(SlowGroup, "broadcast", "broadcast")
    clock.start_step()
    now[0] += 0.5
    SlowGroup().allreduce()
    assert clock.compute_s() == pytest.approx(0.5)
    clock.__exit__()
    SlowGroup().allreduce()
    assert clock.compute_s() == pytest.approx(4.5)  # no longer watched


def test_the_slowest_rank_is_compared_with_the_mean_of_the_others() -> None:
    assert straggler_seconds(2.0, 2.0 + 1.0 + 0.5, 3) == pytest.approx(1.25)
    assert straggler_seconds(1.0, 4.0, 4) == 0
