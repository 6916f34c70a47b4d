from __future__ import annotations

import threading
import time

import pytest

from lakh.errors import PeerTimeout
from lakh.tokens.prefetch import Prefetcher

pytestmark = pytest.mark.timeout(30)  # a hang is a failure


def test_items_come_in_order_and_equal_to_what_was_computed() -> None:
    with Prefetcher(lambda index: index * index, first=3, last=50, depth=4) as ahead:
        assert [ahead.get(index) for index in range(3, 50)] == [index * index for index in range(3, 50)]


def test_no_more_than_depth_items_are_computed_ahead() -> None:
    started: list[int] = []
    full = threading.Event()

    def fetch(index: int) -> int:
        started.append(index)
        if len(started) == 3:
            full.set()
        return index

    with Prefetcher(fetch, 0, 100, 3) as ahead:
        assert full.wait(10)
        time.sleep(0.05)  # were there no bound, the thread would now run ahead
        assert started == [0, 1, 2]
        ahead.get(0)
        ahead.get(1)
        assert len(started) <= 5


def test_an_error_of_the_thread_reaches_the_caller_after_the_good_items() -> None:
    def fetch(index: int) -> int:
        if index == 2:
            raise ValueError("shard 2 is gone")
        return index

    with Prefetcher(fetch, 0, 10, 5) as ahead:
        assert [ahead.get(0), ahead.get(1)] == [0, 1]
        for _ in range(2):  # and it stays
            with pytest.raises(ValueError, match="shard 2 is gone"):
                ahead.get(2)


def test_a_wait_has_an_end_and_is_counted() -> None:
    release = threading.Event()
    with Prefetcher(lambda index: release.wait(20), 0, 2, 1, timeout_s=0.05) as ahead:
        with pytest.raises(PeerTimeout, match="item 0"):
            ahead.get(0)
        assert ahead.wait_s >= 0.05
        release.set()


def test_items_are_taken_strictly_in_order() -> None:
    with Prefetcher(lambda index: index, 5, 7, 2) as ahead:
        with pytest.raises(IndexError):
            ahead.get(6)
        ahead.get(5)
        ahead.get(6)
        with pytest.raises(IndexError):
            ahead.get(7)


def test_closing_ends_the_thread_even_when_it_is_full() -> None:
    ahead = Prefetcher(lambda index: index, 0, 10**9, 2)
    ahead.get(0)
    ahead.close()
    assert not any(thread.name == "prefetch" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        ahead.get(1)
