"""Agreement on the next epoch; members are threads with a common store."""

import threading

import pytest
from torch.distributed import HashStore

from lakh.c3.faults.membership import Epoch, agree_on_epoch
from lakh.errors import LakhError, PeerLost

SETTLE_S = 60.0  # registrations take milliseconds, seconds on a loaded machine
pytestmark = pytest.mark.timeout(2 * SETTLE_S)


def register(members, views, late_s=None, settle_s=SETTLE_S) -> dict:
    """Every member of `views` registers with (known dead, suspects). Returns the outcome of each."""
    store, found = HashStore(), {}

    def one(member: int) -> None:
        dead, suspects = views[member]
        threading.Event().wait((late_s or {}).get(member, 0.0))
        try:
            epoch, _ = agree_on_epoch(
                store, "test", Epoch(0, tuple(members)), member, {}, dead, suspects=suspects, settle_s=settle_s
            )
            found[member] = epoch.members
        except LakhError as error:
            found[member] = error

    threads = [threading.Thread(target=one, args=(member,)) for member in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SETTLE_S / 2)
    return found


def test_survivors_agree_on_each_other() -> None:
    assert register(range(4), {0: ([2], []), 1: ([2], []), 3: ([2], [])}) == dict.fromkeys((0, 1, 3), (0, 1, 3))


def test_a_disconnected_member_stops_itself_and_not_the_others() -> None:
    # it is the lowest, believes all others dead, and registers first
    found = register(range(3), {0: ([1, 2], []), 1: ([0], []), 2: ([0], [])}, late_s={1: 0.2, 2: 0.2})
    assert isinstance(found[0], PeerLost)
    assert found[1] == found[2] == (1, 2)


def test_a_member_that_only_closed_its_connections_is_waited_for() -> None:
    found = register(
        range(3),
        {
            0: ([2], [1]),
            1: ([2], []),
        },
        late_s={1: 0.3},
    )
    assert found == {0: (0, 1), 1: (0, 1)}


def test_a_death_that_only_others_can_see_does_not_take_the_whole_settle_time() -> None:
    views = {0: ([], [1]), 1: ([3], []), 2: ([3], [])}  # 0 shares no subgroup with 3
    assert register(range(4), views) == dict.fromkeys((0, 1, 2), (0, 1, 2))  # the settle time is longer than the test


def test_a_minority_stops() -> None:
    found = register(range(5), {0: ([2, 3, 4], []), 1: ([2, 3, 4], [])}, settle_s=0.5)
    assert all(isinstance(error, PeerLost) and "minority" in str(error) for error in found.values())


def test_a_disconnected_member_does_not_declare_a_late_one_dead() -> None:
    # 0 is disconnected and believes 1 dead; 1 is alive and registers last; the others know that 0 is unreachable
    views = {0: ([1], []), 1: ([0], []), 2: ([0], []), 3: ([0], []), 4: ([0], [])}
    found = register(range(5), views, late_s={1: 0.3})
    assert isinstance(found[0], PeerLost)
    assert [found[member] for member in (1, 2, 3, 4)] == [(1, 2, 3, 4)] * 4


class RecordingStore:
    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.keys: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.keys += keys
        return bool(self._store.check(keys))

    def __getattr__(self, name: str):
        return getattr(self._store, name)


def test_only_the_lowest_member_reads_all_registrations() -> None:
    store, members = HashStore(), tuple(range(200))
    for member in members[1:]:
        store.set(f"test/epoch/1/registered/{member}", '{"accuses": []}')
    recording, found = RecordingStore(store), []

    def one() -> None:
        found.append(agree_on_epoch(recording, "test", Epoch(0, members), 150, {}, [], settle_s=SETTLE_S))

    thread = threading.Thread(target=one)
    thread.start()
    while len(recording.keys) < 20:
        threading.Event().wait(0.01)
    agree_on_epoch(store, "test", Epoch(0, members), 0, {}, [], settle_s=SETTLE_S)
    thread.join(SETTLE_S / 2)
    assert found[0][0].members == members
    assert set(recording.keys) <= {f"test/epoch/1/{key}" for key in ("decision", "registered/0", "registered/1")}
