"""Skipped sequences of a run may change ahead of its position, not behind it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.tokens.loading.skips import SkipRanges
from lakh.trainer.data import merge_skips

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=4
).map(tuple)


@given(before=RANGES, asked=RANGES, position=st.integers(0, 50))
def test_ranges_behind_stay_and_requested_ranges_ahead_are_skipped(before, asked, position) -> None:
    here = SkipRanges(before).index_of(position)
    ahead = tuple((max(first, here), end) for first, end in asked if end > here)
    after = SkipRanges(merge_skips(before, ahead, position))
    assert [after.index_of(k) for k in range(position)] == [SkipRanges(before).index_of(k) for k in range(position)]
    to_come = [after.index_of(k) for k in range(position, position + 40)]
    passed = {index for first, end in ahead for index in range(first, end)}
    assert to_come == [index for index in range(here, here + 200) if index not in passed][:40]
    assert merge_skips(after.ranges, ahead, position) == after.ranges  # a restart with the same settings


def test_sequences_that_were_read_cannot_be_skipped() -> None:
    with pytest.raises(UserError, match=r"data.skip = \[\[2, 5\]\]: sequences before 12 have been read already"):
        merge_skips(((4, 6),), ((2, 5),), 10)
    assert merge_skips(((4, 6),), (), 10) == ((4, 6),)  # a recipe from before a rewind
    assert merge_skips(((4, 6),), ((4, 6), (20, 22)), 10) == ((4, 6), (20, 22))
