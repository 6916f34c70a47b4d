"""Requests to join a run are answered once, and those of dead processes are ignored."""

import threading
from pathlib import Path

import pytest

from lakh.c3.directory_store import DirectoryStore
from lakh.c3.faults.membership import Epoch
from lakh.errors import UserError
from lakh.trainer.launch.added import add_replicas, take_members
from lakh.trainer.recovery.joining import FRESH_S, JoinAnswer, JoinRequests
from lakh.trainer.run_folder import find_rendezvous, publish_rendezvous


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def requests(tmp_path: Path, clock: Clock) -> JoinRequests:
    return JoinRequests(DirectoryStore(tmp_path / "members"), now_s=clock)


def test_a_request_waits_until_it_is_answered(requests: JoinRequests) -> None:
    assert requests.waiting() == []
    asked = requests.ask(3, "facts")
    assert [request.member for request in requests.waiting()] == [3]
    assert requests.find_answer(asked) is None
    answer = JoinAnswer(Epoch(2, (0, 1, 3), (2,), "reason"), {0: {"step": 7}})
    requests.answer(asked, answer)
    assert requests.find_answer(asked) == answer
    assert requests.waiting() == []


def test_a_process_that_stopped_asking_is_ignored(requests: JoinRequests, clock: Clock) -> None:
    asked = requests.ask(3, "facts")
    clock.now_s += 2 * FRESH_S
    assert requests.waiting() == []
    requests.refresh(asked)
    assert [request.nonce for request in requests.waiting()] == [asked.nonce]


def test_the_answer_to_an_earlier_process_is_not_for_its_successor(requests: JoinRequests) -> None:
    first = requests.ask(3, "facts")
    requests.answer(first, JoinAnswer(None, {}, "refused"))
    second = requests.ask(3, "facts")
    assert requests.find_answer(second) is None
    assert [request.nonce for request in requests.waiting()] == [second.nonce]


def test_member_numbers_are_taken_once(tmp_path: Path) -> None:
    taken: list[int] = []
    lock = threading.Lock()

    def take() -> None:
        members = take_members(DirectoryStore(tmp_path), 4, 2)
        with lock:
            taken.extend(members)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == list(range(4, 20))


def test_only_a_run_that_trains_here_can_be_joined(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.toml"):
        add_replicas(str(tmp_path), nproc=1)
    (tmp_path / "run.toml").write_text('name = "r"')
    with pytest.raises(UserError, match="does not train on this machine"):
        add_replicas(str(tmp_path), nproc=1)
    meeting = tmp_path / "meeting" / "0"
    publish_rendezvous(tmp_path, meeting, 4)
    with pytest.raises(UserError, match="does not train on this machine"):  # its launcher has ended
        find_rendezvous(tmp_path)
    meeting.parent.mkdir()
    assert find_rendezvous(tmp_path) == (meeting, 4)
    with pytest.raises(UserError, match="cannot admit ranks"):  # not c3
        add_replicas(str(tmp_path), nproc=1)
