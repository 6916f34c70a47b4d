"""Groups that go on without those they lose and let others in: members are threads here, over the native core."""

import threading
import time

import pytest
import torch

from lakh.c3 import native
from lakh.c3.bootstrap import MemoryStore
from lakh.c3.resilient import Position, ResilientGroup, caught_up
from lakh.errors import LakhError, PeerLost

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++"),
]
PATIENCE_S = 60.0


def test_all_go_on_from_where_the_farthest_has_come() -> None:
    behind = Position(committed=6, synchronised=2, reported=3)
    in_its_next_step = Position(committed=7, synchronised=2, reported=3)
    told_its_caller = Position(committed=7, synchronised=2, reported=4)
    lets_others_in = Position(committed=7, synchronised=2, reported=4, admits=True)
    assert caught_up([behind, in_its_next_step], 5) == Position(7, 2, 3)  # nobody was told: the next commit does
    assert caught_up([behind, told_its_caller], 5) == Position(7, 2, 4)  # all are told of 4, and of 5 at the next
    assert caught_up([behind, lets_others_in, lets_others_in], 5) == Position(7, 2, 5)
    synchronising, done = Position(7, 2, 4), Position(7, 3, 4)
    assert caught_up([synchronising, done], 5) == Position(7, 3, 4)


def _train(group: ResilientGroup, member: int, steps: int, done: torch.Tensor) -> list[float]:
    """The loop of a user: as many steps as `steps` says, counted in `done`; the averages of each step."""
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
def test_who_is_told_of_a_passed_commit_by_its_end_alone_does_as_the_others_did(unlucky) -> None:
    """Member 3 asks to join. At that commit one member loses the answer, and hears only that the epoch is over."""
    store, found, asked = MemoryStore(PATIENCE_S), {}, threading.Event()
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
                _lose_the_answer(group)
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


def _lose_the_answer(group: ResilientGroup) -> None:
    """The first commit whose answer is yes ends for this member with a lost connection, after all others have it."""
    reduce, lost = group._reduce, []

    def once(tensor: torch.Tensor, op: str) -> None:
        reduce(tensor, op)
        if op == "max" and tensor.numel() == 1 and int(tensor) and not lost:
            lost.append(True)
            raise PeerLost("test", "the answer did not arrive", "recover")

    group._reduce = once
