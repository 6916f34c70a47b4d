"""The agreement on who goes on, played by threads over a store."""

import threading

import pytest

from lakh.c3.bootstrap import MemoryStore
from lakh.c3.membership import Epoch, agree
from lakh.errors import LakhError, PeerLost

PATIENCE_S = 60.0  # who waits for somebody that comes, waits for milliseconds; on a busy machine for seconds
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


def sign(members, views, late_s=None, settle_s=PATIENCE_S) -> dict:
    """Every member of `views` signs with (known dead, suspects); what each of them learns."""
    store, found = MemoryStore(PATIENCE_S), {}

    def one(member: int) -> None:
        dead, suspects = views[member]
        threading.Event().wait((late_s or {}).get(member, 0.0))
        try:
            epoch, _ = agree(
                store, "test", Epoch(0, tuple(members)), member, {}, dead, suspects=suspects, settle_s=settle_s
            )
            found[member] = epoch.members
        except LakhError as error:
            found[member] = error

    threads = [threading.Thread(target=one, args=(member,)) for member in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_survivors_agree_on_each_other() -> None:
    assert sign(range(4), {0: ([2], []), 1: ([2], []), 3: ([2], [])}) == dict.fromkeys((0, 1, 3), (0, 1, 3))


def test_one_that_is_cut_off_stops_itself_and_not_the_others() -> None:
    # it is the lowest, believes that all others are dead, and signs first
    found = sign(range(3), {0: ([1, 2], []), 1: ([0], []), 2: ([0], [])}, late_s={1: 0.2, 2: 0.2})
    assert isinstance(found[0], PeerLost)
    assert found[1] == found[2] == (1, 2)


def test_one_that_only_closed_its_connections_is_waited_for() -> None:
    found = sign(
        range(3),
        {
            0: ([2], [1]),
            1: ([2], []),
        },
        late_s={1: 0.3},
    )
    assert found == {0: (0, 1), 1: (0, 1)}


def test_a_minority_stops() -> None:
    found = sign(range(5), {0: ([2, 3, 4], []), 1: ([2, 3, 4], [])}, settle_s=0.5)
    assert all(isinstance(error, PeerLost) and "minority" in str(error) for error in found.values())


def test_one_that_is_cut_off_does_not_decide_that_a_late_one_is_dead() -> None:
    # 0 is cut off and takes 1 for dead; 1 lives and signs last; the others have found out that it is 0
    views = {0: ([1], []), 1: ([0], []), 2: ([0], []), 3: ([0], []), 4: ([0], [])}
    found = sign(range(5), views, late_s={1: 0.3})
    assert isinstance(found[0], PeerLost)
    assert [found[member] for member in (1, 2, 3, 4)] == [(1, 2, 3, 4)] * 4
