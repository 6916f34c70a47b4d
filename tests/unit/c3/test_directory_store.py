"""The directory store: atomic values, one winner of compare-and-set, exact counts, also when writers are killed."""

import os
import secrets
import signal
import subprocess
import sys
import threading

import pytest

from lakh.c3.directory_store import DirectoryStore
from lakh.errors import PeerTimeout


def test_a_value_is_visible_to_all_once_it_is_set(tmp_path) -> None:
    one, two = DirectoryStore(tmp_path / "store"), DirectoryStore(tmp_path / "store")
    assert not two.check(["a/b"])
    one.set("a/b", "x")
    assert two.check(["a/b"])
    assert two.get("a/b") == b"x"


def test_a_key_that_is_never_set_is_a_timeout(tmp_path) -> None:
    with pytest.raises(PeerTimeout, match="never"):
        DirectoryStore(tmp_path, timeout_s=0.05).get("never")


def test_the_first_to_compare_and_set_wins(tmp_path) -> None:
    store = DirectoryStore(tmp_path)
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "", "second") == b"first"
    assert store.compare_set("k", "first", "third") == b"third"
    assert store.compare_set("other", "first", "no") == b"first"
    assert not store.check(["other"])


def test_concurrent_compare_and_set_loses_no_update(tmp_path) -> None:
    won = []

    def claim() -> None:
        mine = DirectoryStore(tmp_path)
        for _ in range(25):
            name = secrets.token_hex(8)
            slot = 0
            while mine.compare_set(f"slot/{slot}", "", name) != name.encode():
                slot += 1
            won.append(slot)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(100))


def test_a_killed_writer_leaves_complete_values_and_no_lock(tmp_path) -> None:
    program = (
        "import sys; from lakh.c3.directory_store import DirectoryStore\n"
        f"store = DirectoryStore({str(tmp_path)!r})\nprint('on', flush=True)\n"
        "while True: store.set('k', 'x' * 100_000); store.compare_set('n', '', 'y')"
    )
    for turn in range(3):
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        DirectoryStore(tmp_path).get("k")
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        store = DirectoryStore(tmp_path)
        assert store.get("k") == b"x" * 100_000
        assert store.compare_set(f"after {turn}", "", "the lock is free") == b"the lock is free"
