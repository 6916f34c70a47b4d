"""Run folders of others are shown safely: no crash, no link followed, texts and tables bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dashboard.hostile_run import MARKUP, write_hostile_run

from lakh.dashboard.page import page
from lakh.dashboard.records import clean_record
from lakh.dashboard.runs import RunCollection


@pytest.mark.parametrize("seed", range(4))
def test_wrong_values_in_every_field_give_a_page_of_bounded_size(seed: int, tmp_path: Path) -> None:
    write_hostile_run(tmp_path / "run", seed)
    runs = RunCollection(str(tmp_path))
    runs.read_all()
    text = page(runs.data())
    assert len(text) < 400_000  # each of hundreds of fields had 200,000 characters
    assert MARKUP not in text.partition('id="data">')[2]
    (shown,) = runs.data()["details"]
    assert shown["read"]["unreadable_lines"] > 0
    assert shown["read"]["events"] > 200


def test_settings_that_are_a_link_or_huge_are_not_read(fake_run: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret.toml"
    secret.write_text('password = "hunter2"\n')
    fake_run.begin()
    settings = fake_run.run_dir / "run.toml"
    settings.symlink_to(secret)
    runs = RunCollection(str(fake_run.run_dir))
    runs.read_all()
    assert runs.data()["details"][0]["settings"] == {}
    settings.unlink()
    settings.write_text(f'a = "{"x" * (1 << 20)}"\n')
    runs.read_all()
    assert runs.data()["details"][0]["settings"] == {}


def test_fields_of_the_wrong_type_are_dropped_and_usable_ones_stay() -> None:
    step = {"time_s": 1.0, "rank": 0, "step": 3, "kind": "step_done", "loss": float("nan"), "step_s": 0.5, "mfu": None}
    assert clean_record(step) is step  # as it is: nearly all records are like this
    found = clean_record({**step, "loss": "low", "note": "kept"})
    assert found is not None
    assert "loss" not in found
    assert (found["step_s"], found["note"]) == (0.5, "kept")
    lost = {"time_s": 1, "rank": 0, "step": 3, "kind": "ranks_lost", "lost": [1, "2"], "left": 1, "seconds": 1e30}
    assert clean_record(lost) == {"time_s": 1, "rank": 0, "step": 3, "kind": "ranks_lost", "left": 1}
    for wrong in (
        {"step": 1.5},
        {"rank": -1},
        {"rank": {}},
        {"time_s": float("inf")},
        {"step": 10**30},
        {"step": True},
    ):
        assert clean_record({**step, **wrong}) is None


def test_a_record_of_an_unknown_kind_is_cut() -> None:
    found = clean_record({"time_s": 1.0, "kind": "k" * 500, "text": "t" * 9_000, "deep": {"a": [1] * 9_000}})
    assert found is not None
    assert len(found["kind"]) == 60
    assert len(json.dumps(found)) < 5_000
