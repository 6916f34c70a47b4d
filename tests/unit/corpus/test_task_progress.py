"""Which document killed its worker, and what happens to the task."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.task_progress import MARKER_BYTES, MAX_SKIPPED, ProgressMarker, TaskProgress, decide_retry


@pytest.mark.parametrize(
    ("deaths", "skipped", "action"),
    [
        ([""], 0, "retry"),
        (["", "a"], 0, "retry"),
        (["", "a", "a"], 0, "skip"),
        (["a", "a", "a"], 1, "skip"),
        (["", "a", "b"], 0, "give-up"),  # no particular document: another cause
        (["", "", ""], 0, "give-up"),
        (["", "a", "a"], MAX_SKIPPED, "give-up"),
    ],
)
def test_document_is_skipped_after_its_workers_died(deaths: list[str], skipped: int, action: str) -> None:
    decision = decide_retry(deaths, skipped)
    assert decision.action == action
    assert (decision.place == "a") is (deaths[-1] == "a" and action != "retry")
    assert decision.reason


@given(st.text(max_size=3000))
def test_place_is_recognised_whatever_its_length(place: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(MARKER_BYTES)
        mark, reader = ProgressMarker(file.fileno()), ProgressMarker(file.fileno())
        mark.write("x" * 500)
        TaskProgress(None, mark).mark(place)
        if not any("\ud800" <= character <= "\udfff" for character in place):
            assert TaskProgress(skipped=[reader.read()]).skips(place)
        assert not TaskProgress(skipped=[reader.read()]).skips(place + "?")
        mark.close()
        reader.close()
