"""The collectives benchmark: sizes, and how often an operation is timed."""

import pytest
from bench.comm.collectives import calls_of, calls_within, parse_size

from lakh.errors import UserError


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("1KB", "8MB", "2gb", "17B")] == [1024, 8 << 20, 2 << 30, 17]
    with pytest.raises(UserError):
        parse_size("large")


def test_small_operations_are_timed_more_often() -> None:
    assert calls_of(1 << 10) > calls_of(8 << 20)
    assert calls_of(1 << 10, asked=7) == calls_of(8 << 20, asked=7) == 7


def test_long_operations_are_timed_few_times() -> None:
    assert calls_within(200, 1e-4, turns=5) == (3, 40)
    assert calls_within(25, 2.4, turns=5) == (0, 1)  # at least one per turn
    assert calls_within(25, 0.9, turns=5) == (0, 2)
