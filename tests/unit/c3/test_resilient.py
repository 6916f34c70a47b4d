"""Resilient groups lose and admit members; members are threads, over the native core."""

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from lakh.c3 import native
from lakh.c3.faults.resilient import MemberProgress, ResilientGroup, merge_progress
from lakh.errors import LakhError, PeerLost

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++"),
]
PATIENCE_S = 60.0


def test_all_members_continue_from_the_farthest_one() -> None:
    behind = MemberProgress(committed=6, synchronised=2, reported=3)
    in_its_next_step = MemberProgress(committed=7, synchronised=2, reported=3)
    reported_to_caller = MemberProgress(committed=7, synchronised=2, reported=4)
    admits_members = MemberProgress(committed=7, synchronised=2, reported=4, admits=True)
    assert merge_progress([behind, in_its_next_step], 5) == MemberProgress(
        7, 2, 3
    )  # not reported yet: the next commit does
    assert merge_progress([behind, reported_to_caller], 5) == MemberProgress(
        7, 2, 4
    )  # 4 is reported to all, 5 at the next
    assert merge_progress([behind, admits_members, admits_members], 5) == MemberProgress(7, 2, 5)
    synchronising, done = MemberProgress(7, 2, 4), MemberProgress(7, 3, 4)
    assert merge_progress([synchronising, done], 5) == MemberProgress(7, 3, 4)


def _train(group: ResilientGroup, member: int, steps: int, done: torch.Tensor) -> list[float]:
    """A user's training loop of `steps` steps, counted in `done`. Returns the average of each step."""
    seen = []
    while int(done) < steps:
        bucket = torch.full((10,), float(member + 1))
        group.all_reduce(bucket)
        changed = group.commit()
        seen.append(float(bucket[0]))
        done += 1
        if changed:
            group.synchronise([done])
    return seen


@pytest.mark.parametrize("unlucky", [0, 1, 2])
def test_a_member_that_misses_the_result_of_a_commit_continues_like_the_others(unlucky) -> None:
    """Member 3 requests to join. At that commit one member loses the result and only learns that the epoch ended."""
    store, found, asked = HashStore(), {}, threading.Event()
    options = {"timeout_s": PATIENCE_S, "settle_s": PATIENCE_S}
    steps = 6

    def member(number: int) -> None:
        try:
            group = ResilientGroup(store, number, 3, **options)
            if number == 0:
                asked.wait(PATIENCE_S)
                while not store.check(["c3-resilient/join/1"]):
                    time.sleep(0.01)
            if number == unlucky:
                _drop_commit_result(group)
            found[number] = _train(group, number, steps, torch.zeros(1))
            group.close()
        except LakhError as error:
            found[number] = error

    def joiner() -> None:
        try:
            asked.set()
            group = ResilientGroup.rejoin(store, 3, **options)
            done = torch.zeros(1)
            group.synchronise([done])
            found[3] = _train(group, 3, steps, done)
            group.close()
        except LakhError as error:
            found[3] = error

    threads = [threading.Thread(target=member, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=joiner))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a member hangs"
    assert found[0] == found[1] == found[2], found
    assert found[3] == found[0][-len(found[3]) :], found
    assert found[0][0] == 2.0  # of three
    assert found[0][-1] == 2.5  # of four


def _drop_commit_result(group: ResilientGroup) -> None:
    """Fails this member's first commit that admits a member, after all others have completed it."""
    reduce, lost = group._reduce, []

    def once(tensor: torch.Tensor, op: str) -> None:
        reduce(tensor, op)
        if op == "max" and tensor.numel() == 1 and int(tensor) and not lost:
            lost.append(True)
            raise PeerLost("test", "the answer did not arrive", "recover")

    group._reduce = once
