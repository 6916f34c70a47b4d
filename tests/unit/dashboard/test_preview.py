"""A long run is shown by some of its steps until all are read."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from lakh.dashboard import preview
from lakh.dashboard.run_view import RunView
from lakh.events import EventLog, StepDone
from lakh.events.extremes import EXTREMES, StepExtremes

FIELDS = ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "data_wait_s")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_BYTES", 50_000), ("LINES", 100), ("TAIL_BYTES", 4_000)):
        monkeypatch.setattr(preview, name, value)
    monkeypatch.setattr("lakh.events.reading.READ_BYTES", 8_192)


def test_the_preview_spans_the_run_and_the_rest_follows(fake_run: Any) -> None:
    (fake_run.run_dir / "run.toml").write_text("[train]\nsteps = 1000\n")
    fake_run.begin()
    fake_run.steps(1, 1000, loss=lambda step: 99.0 if step == 501 else 1000.0 - step)
    fake_run.event("run_ended", step=1000, reason="last step done", seconds=1.0)
    view = RunView("run", fake_run.run_dir)
    assert view.refresh(budget_s=0.0)  # there is more to read
    shown = view.data(fake_run.now_s, points=600)
    assert shown["read"]["is_preview"]
    assert (shown["step"], shown["loss"], shown["state"]["word"]) == (1000, 0.0, "done")
    steps = shown["curves"]["loss"]["step"]
    assert steps[-1] == 1000
    assert max(after - before for before, after in itertools.pairwise(steps)) < 40
    assert view.last_s == fake_run.now_s
    while view.refresh(budget_s=0.0):
        pass
    whole = view.data(fake_run.now_s, points=600)
    assert not whole["read"]["is_preview"]
    assert 99.0 in whole["curves"]["loss"]["value"]
    assert whole["step"] == 1000


def test_steps_that_a_restart_repeats_are_not_drawn_twice(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 400)
    fake_run.begin(200, attempt=1)
    fake_run.steps(201, 400)
    found = preview.preview_run(fake_run.run_dir)
    assert found is not None
    steps = found.table.column("step")[found.table.current]
    assert list(steps) == sorted(set(steps))
    assert found.step == 400


def test_damaged_lines_and_short_files_have_no_preview(fake_run: Any) -> None:
    fake_run.begin()
    assert preview.preview_run(fake_run.run_dir) is None
    path = fake_run.run_dir / "events" / "rank-00000.jsonl"
    path.write_bytes(b"\xff\x00 not json\n" * 10_000 + b'{"kind": 3}\n[1]\n' + b"x" * 100_000)
    found = preview.preview_run(fake_run.run_dir)
    assert found is not None
    assert (found.step, found.ended, len(found.table.column("step"))) == (0, None, 0)
    path.unlink()
    assert preview.preview_run(fake_run.run_dir) is None


def test_the_preview_has_every_minimum_and_maximum_of_a_run_that_lakh_wrote(tmp_path: Path) -> None:
    spikes = {333: 9.0, 734: -3.0, 999: math.nan}
    with EventLog(tmp_path, queue_events=5_000) as log:
        log.write(StepDone(step=0, time_s=1.0, **dict.fromkeys(FIELDS, 1.0)))
        for step in range(1, 1500):
            values = {**dict.fromkeys(FIELDS, 1.0), "loss": spikes.get(step, 1.0 + 0.01 * (step % 7))}
            log.write(StepDone(step=step, time_s=1.0 + step, **values))
    view = RunView("run", tmp_path)
    assert view.refresh(budget_s=0.0)
    shown = view.data(2000.0, points=600)
    assert (shown["read"]["is_preview"], shown["read"]["has_extremes"]) == (True, True)
    at = dict(zip(shown["curves"]["loss"]["step"], shown["curves"]["loss"]["value"], strict=True))
    assert (at[333], at[734], at[999]) == (9.0, -3.0, None)
    assert (tmp_path / "events" / EXTREMES).read_bytes().count(b"\n") < 60


def test_extreme_steps_come_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.events.extremes.BLOCK_STEPS", 5)
    extremes = StepExtremes(tmp_path)
    for step, loss in enumerate([3.0, 5.0, 4.0, 1.0, 2.0, 7.0, None, 7.0]):
        extremes.add({"loss": loss}, b"%d\n" % step)
    extremes.flush()
    extremes.flush()
    assert (tmp_path / EXTREMES).read_text().split() == ["0", "1", "3", "4", "5", "7"]


def test_a_link_in_place_of_the_extreme_steps_is_not_followed(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.steps(1, 400)
    (tmp_path / "elsewhere").write_text('{"time_s": 3.0, "rank": 0, "step": 7777, "kind": "step_done"}\n')
    (fake_run.run_dir / "events" / EXTREMES).symlink_to(tmp_path / "elsewhere")
    found = preview.preview_run(fake_run.run_dir)
    assert found is not None
    assert (found.has_extremes, found.step) == (False, 400)
