"""What the room says about a run follows from its events."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakh import events
from lakh.dashboard.page import as_json, page
from lakh.dashboard.run_view import RunView
from lakh.dashboard.runs import RunCollection
from lakh.goodput import CLASSES, goodput


def viewed(story: Any) -> dict[str, Any]:
    run = RunView("run", story.run_dir)
    while run.refresh():
        pass
    return run.data(story.now_s + 1.0, points=600)


def test_a_run_that_was_hurt_and_went_on(faulty_run: Any) -> None:
    found = viewed(faulty_run)
    assert found["state"] == {"word": "done", "reason": "last step done"}
    assert (found["step"], found["steps"], found["restarts"]) == (120, 120, 1)
    assert found["curves"]["loss"]["step"] == list(range(1, 121))  # each step once: as it was kept
    assert found["curves"]["lost_loss"]["step"] == list(range(51, 71))
    assert found["curves"]["heldout"]["value"] == [4.2, 4.1]
    assert found["curves"]["bits-per-byte: bits_per_byte"]["value"] == [1.75, 1.5]
    assert found["curves"]["bits-per-byte: bits_per_byte"]["low"] == [1.65, 1.4]
    assert not any(name.endswith((": low", ": high")) for name in found["curves"])
    assert [score["passed"] for score in found["scores"]["humaneval"]] == [1, 3]
    assert found["checkpoints_at"]["step"] == [50, 100]
    kinds = [told["kind"] for told in found["unusual"]]
    assert kinds == ["run_ended", "run_started", "restarted", "fault_injected", "run_started"]
    assert [mark["what"] for mark in found["marks"]] == ["serious", "serious"]
    assert [mark["step"] for mark in found["marks"]] == [70, 70]


def test_time_is_shared_out_as_the_trainer_does(faulty_run: Any) -> None:
    theirs = goodput(events.read(faulty_run.run_dir, rank=0))
    found = viewed(faulty_run)
    assert found["goodput"] == pytest.approx(theirs["ratio"])
    assert found["spent_s"] == pytest.approx(theirs["classes_s"], abs=1e-6)
    assert found["spent_s"]["lost"] == pytest.approx(20.0)
    assert found["spent_s"]["down"] == pytest.approx(4.0)


def test_a_run_that_goes_on_with_another_setting_was_down_meanwhile(faulty_run: Any) -> None:
    faulty_run.tell("setting_changed", step=120, after_s=30.0, path="train.steps", before=120, after=130)
    faulty_run.begin(120)
    faulty_run.steps(121, 130)
    found = viewed(faulty_run)["spent_s"]
    assert found == pytest.approx(goodput(events.read(faulty_run.run_dir, rank=0))["classes_s"], abs=1e-6)
    assert found["down"] == pytest.approx(4.0 + 30.0)


def test_by_the_clock_every_stretch_is_shared_out_whole_and_sums_to_the_same(faulty_run: Any) -> None:
    found = viewed(faulty_run)
    shares, width_s = found["clock"]["shares"], (found["clock"]["ended_s"] - found["clock"]["began_s"]) / 120
    for parts in zip(*shares.values(), strict=True):
        assert sum(parts) == pytest.approx(1.0, abs=0.002)  # each of eight is rounded to four digits
    for name in CLASSES:
        # The same rounding, over 120 stretches.
        assert sum(shares[name]) * width_s == pytest.approx(found["spent_s"][name], abs=120 * 5e-5 * width_s + 1e-6)


def test_steps_that_a_run_went_back_over_are_lost_at_once(story: Any) -> None:
    story.begin()
    story.steps(1, 30)
    story.tell("rewound", step=30, to_step=20, reason="loss 9 is far above 4", skipped=[[232, 240]])
    found = viewed(story)
    assert found["curves"]["loss"]["step"][-1] == 20
    assert found["spent_s"]["lost"] == pytest.approx(10.0)
    assert "went back to step 20 and skips 8 sequences" in found["unusual"][0]["text"]


def test_a_skipped_step_is_told_once_for_all_ranks_and_is_not_productive(story: Any) -> None:
    story.begin()
    for rank in (0, 1):
        story.tell("step_skipped", step=1, rank=rank, reason="gradient norm inf is not finite")
    story.steps(1, 3)
    found = viewed(story)
    [told] = [told for told in found["unusual"] if told["kind"] == "step_skipped"]
    assert (told["ranks"], told["num_ranks"]) == ([0, 1], 2)
    assert found["spent_s"]["lost"] == pytest.approx(1.0)


def test_a_spike_and_a_loss_that_is_no_number_are_told_and_drawn(story: Any) -> None:
    story.begin()
    losses = {81: 9.0, 82: 8.0, 90: math.nan}
    story.steps(1, 100, loss=lambda step: losses.get(step, 4.0))
    found = viewed(story)
    texts = [told["text"] for told in found["unusual"] if told["kind"] == "spike of loss"]
    assert texts == ["the loss is nan", "the loss 9.0000 is above 4.0000 + 4 x 0.0800 of the last 64 steps"]
    assert [told["last_step"] for told in found["unusual"] if told["kind"] == "spike of loss"] == [90, 82]
    assert None in found["curves"]["loss"]["value"]
    assert "NaN" not in as_json(found)


def test_events_of_another_version_are_shown_as_they_are(story: Any) -> None:
    story.begin()
    story.tell("teleported", step=3, to="node-7", reason="it could")
    story.tell("ranks_lost", step=4, who=[3])  # fields that we do not know
    story.tell("step_done", step=5, loss="high")
    story.tell("resources", step=5, memory_bytes="?")
    found = viewed(story)
    texts = [told["text"] for told in found["unusual"]]
    assert "teleported: it could (to node-7)" in texts
    assert "ranks lost (who [3])" in texts
    assert found["step"] == 5
    json.loads(as_json(found))


def test_what_a_run_is_doing_now(story: Any) -> None:
    run = RunView("run", story.run_dir)
    run.refresh()
    assert run.data(story.now_s, points=10)["state"]["word"] == "waiting"
    story.begin()
    run.refresh()
    assert run.data(story.now_s, points=10)["state"]["word"] == "starting"
    (story.run_dir / "run.toml").write_text("[train]\nsteps = 100\n")
    story.steps(1, 50)
    run.refresh()
    now = run.data(story.now_s, points=10)
    assert now["state"]["word"] == "running"
    assert now["left_s"] == pytest.approx(50 * 53 / 50)  # at the pace so far, with the 3 s of its start
    assert run.data(story.now_s + 3600, points=10)["state"]["word"] == "silent"
    story.tell("run_ended", step=50, reason="stopped by SIGTERM", seconds=50.0)
    run.refresh()
    assert run.data(story.now_s, points=10)["state"] == {"word": "stopped", "reason": "stopped by SIGTERM"}
    story.begin(50)
    story.steps(51, 51)
    run.refresh()
    assert run.data(story.now_s, points=10)["state"]["word"] == "running"


def test_a_folder_that_is_used_again_is_read_from_its_beginning(story: Any) -> None:
    story.begin()
    story.steps(1, 20)
    run = RunView("run", story.run_dir)
    run.refresh()
    (story.run_dir / "events" / "rank-00000.jsonl").unlink()
    story.begin()
    story.steps(1, 3)
    while run.refresh():
        pass
    assert run.data(story.now_s, points=10)["step"] == 3


def test_a_window_of_steps_is_given_in_full(story: Any) -> None:
    story.begin()
    story.steps(1, 500)
    run = RunView("run", story.run_dir)
    run.refresh()
    whole = run.data(story.now_s, points=50)["curves"]["loss"]["step"]
    part = run.data(story.now_s, points=50, window=(100.0, 140.0))["curves"]["loss"]["step"]
    assert len(whole) <= 50
    assert part == list(range(100, 141))


def test_several_runs_side_by_side_the_newest_first(tmp_path: Path, new_story: Callable[[Path], Any]) -> None:
    for number, name in enumerate(("a", "deep/er/b")):
        told = new_story(tmp_path / name)
        told.now_s += number
        told.begin()
        told.steps(1, 5)
    (tmp_path / "a" / "checkpoints" / "events").mkdir(parents=True)  # not a run
    runs = RunCollection(str(tmp_path))
    runs.read_all()
    data = runs.data()
    assert [run["name"] for run in data["runs"]] == ["deep/er/b", "a"]
    assert [run["name"] for run in runs.data(["a"])["details"]] == ["a"]


def test_runs_appear_and_vanish_while_the_room_is_open(
    tmp_path: Path, new_story: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.dashboard.runs.FIND_RUNS_EVERY_S", -1.0)
    runs = RunCollection(str(tmp_path))
    assert runs.names == []
    new_story(tmp_path / "folder" / "a").begin()
    runs.refresh()
    assert runs.names == ["folder/a"]
    shutil.rmtree(tmp_path / "folder")
    new_story(tmp_path / "b").begin()
    runs.refresh()
    assert runs.names == ["b"]
    shutil.rmtree(tmp_path)
    runs.refresh()  # nothing is left to look at, and nothing breaks


def test_folders_that_are_not_ours_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "run" / "events").mkdir(parents=True)
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert RunCollection(str(tmp_path)).names == ["run"]


def test_the_page_holds_its_data_and_asks_nobody_else(faulty_run: Any) -> None:
    faulty_run.tell("teleported", reason="</script><script>alert(1)</script><!--")
    text = page({"details": [viewed(faulty_run)], "runs": [], "folder": "x", "lakh": "0", "time_s": 0.0})
    assert text.count("</script>") == 2
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert "https://" not in text
    assert "/*" not in text.split("<script")[1]
