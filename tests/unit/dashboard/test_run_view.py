"""The data of the page, from the events of a run."""

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


def viewed(fake_run: Any) -> dict[str, Any]:
    run = RunView("run", fake_run.run_dir)
    while run.refresh():
        pass
    return run.data(fake_run.now_s + 1.0, points=600)


def test_a_run_with_a_fault_and_a_restart(faulty_run: Any) -> None:
    found = viewed(faulty_run)
    assert found["state"] == {"word": "done", "reason": "last step done"}
    assert (found["step"], found["steps"], found["restarts"]) == (120, 120, 1)
    assert found["curves"]["loss"]["step"] == list(range(1, 121))  # each step once, from its last attempt
    assert found["curves"]["lost_loss"]["step"] == list(range(51, 71))
    assert found["curves"]["heldout"]["value"] == [4.2, 4.1]
    assert found["curves"]["bits-per-byte: bits_per_byte"]["value"] == [1.75, 1.5]
    assert found["curves"]["bits-per-byte: bits_per_byte"]["low"] == [1.65, 1.4]
    assert not any(name.endswith((": low", ": high")) for name in found["curves"])
    assert [score["passed"] for score in found["scores"]["humaneval"]] == [1, 3]
    assert found["checkpoints_at"]["step"] == [50, 100]
    assert [entry["kind"] for entry in found["unusual"]] == ["restarted", "fault_injected"]
    assert [entry["kind"] for entry in found["history"]] == ["run_ended", "run_started", "run_started"]
    assert [mark["what"] for mark in found["marks"]] == ["serious", "serious"]
    assert [mark["step"] for mark in found["marks"]] == [70, 70]


def test_settings_are_listed_by_path(faulty_run: Any) -> None:
    (faulty_run.run_dir / "run.toml").write_text('name = "small"\n[train]\nsteps = 120\n[data]\nmixture = [1, 2]\n')
    assert viewed(faulty_run)["settings"] == {"name": "small", "train.steps": 120, "data.mixture": "[1, 2]"}


def test_goodput_equals_the_trainers(faulty_run: Any) -> None:
    theirs = goodput(events.read(faulty_run.run_dir, rank=0))
    found = viewed(faulty_run)
    assert found["goodput"] == pytest.approx(theirs["ratio"])
    assert found["spent_s"] == pytest.approx(theirs["classes_s"], abs=1e-6)
    assert found["spent_s"]["lost"] == pytest.approx(20.0)
    assert found["spent_s"]["restart"] == pytest.approx(4.0 + 3.0)  # until the next attempt began, and its start


def test_the_time_before_a_resume_does_not_count(faulty_run: Any) -> None:
    faulty_run.event("setting_changed", step=120, after_s=30.0, path="train.steps", before=120, after=130)
    faulty_run.begin(120)
    faulty_run.steps(121, 130)
    found = viewed(faulty_run)["spent_s"]
    assert found == pytest.approx(goodput(events.read(faulty_run.run_dir, rank=0))["classes_s"], abs=1e-6)
    assert found["restart"] == pytest.approx(4.0 + 3.0)
    assert found["other"] < 1.0  # and not the 30 s


def test_the_shares_of_the_timeline_sum_to_the_seconds_by_class(faulty_run: Any) -> None:
    found = viewed(faulty_run)
    shares, width_s = found["clock"]["shares"], (found["clock"]["ended_s"] - found["clock"]["began_s"]) / 120
    for parts in zip(*shares.values(), strict=True):
        assert sum(parts) == pytest.approx(1.0, abs=0.002)  # eight shares, each rounded to four digits
    for name in CLASSES:
        # The same rounding, over 120 parts.
        assert sum(shares[name]) * width_s == pytest.approx(found["spent_s"][name], abs=120 * 5e-5 * width_s + 1e-6)


def test_steps_are_lost_as_soon_as_the_run_rewinds(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 30)
    fake_run.event("rewound", step=30, to_step=20, reason="loss 9 is far above 4", skipped=[[232, 240]])
    found = viewed(fake_run)
    assert found["curves"]["loss"]["step"][-1] == 20
    assert found["spent_s"]["lost"] == pytest.approx(10.0)
    assert "went back to step 20 and skips 8 sequences" in found["unusual"][0]["text"]


def test_a_skipped_step_is_listed_once_for_all_ranks_and_not_productive(fake_run: Any) -> None:
    fake_run.begin()
    for rank in (0, 1):
        fake_run.event("step_skipped", step=1, rank=rank, reason="gradient norm inf is not finite")
    fake_run.steps(1, 3)
    found = viewed(fake_run)
    [entry] = [entry for entry in found["unusual"] if entry["kind"] == "step_skipped"]
    assert (entry["ranks"], entry["num_ranks"]) == ([0, 1], 2)
    assert found["spent_s"]["lost"] == pytest.approx(1.0)


def test_spikes_and_nan_losses_are_listed_and_drawn(fake_run: Any) -> None:
    fake_run.begin()
    losses = {81: 9.0, 82: 8.0, 90: math.nan}
    fake_run.steps(1, 100, loss=lambda step: losses.get(step, 4.0))
    found = viewed(fake_run)
    texts = [entry["text"] for entry in found["unusual"] if entry["kind"] == "spike of loss"]
    assert texts == ["the loss is nan", "the loss 9.0000 is above 4.0000 + 4 x 0.0800 of the last 64 steps"]
    assert [entry["last_step"] for entry in found["unusual"] if entry["kind"] == "spike of loss"] == [90, 82]
    assert None in found["curves"]["loss"]["value"]
    assert "NaN" not in as_json(found)


def test_events_of_another_version_are_listed_with_their_fields(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.event("teleported", step=3, to="node-7", reason="it could")
    fake_run.event("ranks_lost", step=4, who=[3])  # unknown fields
    fake_run.event("step_done", step=5, loss="high")
    fake_run.event("resources", step=5, memory_bytes="?")
    found = viewed(fake_run)
    texts = [entry["text"] for entry in [*found["unusual"], *found["history"]]]
    assert "teleported: it could (to node-7)" in texts
    assert "ranks lost (who [3])" in texts
    assert found["step"] == 5
    json.loads(as_json(found))


def test_the_state_of_a_run(fake_run: Any) -> None:
    run = RunView("run", fake_run.run_dir)
    run.refresh()
    assert run.data(fake_run.now_s, points=10)["state"]["word"] == "waiting"
    fake_run.begin()
    run.refresh()
    assert run.data(fake_run.now_s, points=10)["state"]["word"] == "starting"
    (fake_run.run_dir / "run.toml").write_text("[train]\nsteps = 100\n")
    fake_run.steps(1, 50)
    run.refresh()
    now = run.data(fake_run.now_s, points=10)
    assert now["state"]["word"] == "running"
    assert now["left_s"] == pytest.approx(50 * 53 / 50)  # at the pace so far, with the 3 s of its start
    assert run.data(fake_run.now_s + 3600, points=10)["state"]["word"] == "silent"
    fake_run.event("run_ended", step=50, reason="stopped by SIGTERM", seconds=50.0)
    run.refresh()
    assert run.data(fake_run.now_s, points=10)["state"] == {"word": "stopped", "reason": "stopped by SIGTERM"}
    fake_run.begin(50)
    fake_run.steps(51, 51)
    run.refresh()
    assert run.data(fake_run.now_s, points=10)["state"]["word"] == "running"


def test_events_that_cannot_be_read_are_named(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 5)
    folder = fake_run.run_dir / "events"
    moved = folder.rename(fake_run.run_dir / "moved")
    folder.symlink_to(folder)
    run = RunView("run", fake_run.run_dir)
    run.refresh()
    found, changes = run.data(fake_run.now_s, points=10), run.changes
    why = f"cannot read {folder}: too many levels of symbolic links"
    assert found["state"] == {"word": "unreadable", "reason": f"{why}; check its owner and mode"}
    assert found["read"]["unreadable_files"] == [why]
    assert not run.refresh()
    assert run.changes == changes  # nothing new to show
    folder.unlink()
    moved.rename(folder)
    (folder / "rank-00003.jsonl").symlink_to("rank-00003.jsonl")
    while run.refresh():
        pass
    assert run.changes > changes
    found = run.data(fake_run.now_s, points=10)
    assert (found["state"]["word"], found["step"]) == ("running", 5)  # rank 0 says how far it is
    assert [text.partition(":")[0] for text in found["read"]["unreadable_files"]] == [
        f"cannot read {folder}/rank-00003.jsonl"
    ]


def test_the_time_left_after_a_resume_leaves_out_the_time_it_was_stopped(fake_run: Any) -> None:
    (fake_run.run_dir / "run.toml").write_text("[train]\nsteps = 100\n")
    fake_run.begin(seconds=0.0)
    fake_run.steps(1, 50)
    fake_run.event("run_ended", step=50, reason="stopped by SIGINT", seconds=50.0)
    fake_run.now_s += 12 * 3600
    fake_run.begin(50, seconds=0.0)
    fake_run.steps(51, 60)
    found = viewed(fake_run)
    assert sum(found["spent_s"].values()) == pytest.approx(60.0)  # the stop does not count
    assert found["left_s"] == pytest.approx(40.0)


def test_resuming_a_finished_run_keeps_its_goodput(faulty_run: Any) -> None:
    before = viewed(faulty_run)
    faulty_run.now_s += 7200
    faulty_run.begin(120, seconds=60.0)
    faulty_run.event("evaluated", step=120, after_s=200.0, loss=4.0, sequences=32, seconds=200.0)
    assert viewed(faulty_run)["state"]["word"] == "running"
    faulty_run.event("run_ended", step=120, reason="last step done", seconds=1.0)
    after = viewed(faulty_run)
    assert (after["goodput"], after["spent_s"]) == (before["goodput"], before["spent_s"])
    assert after["state"]["word"] == "done"
    assert after["heldout_loss"] == 4.0
    theirs = goodput(events.read(faulty_run.run_dir, rank=0))
    assert theirs["ratio"] == pytest.approx(before["goodput"])


def test_a_finished_run_that_goes_on_counts_only_the_resume_that_took_steps(faulty_run: Any) -> None:
    faulty_run.begin(120, seconds=5.0)
    faulty_run.event("run_ended", step=120, reason="last step done", seconds=1.0)
    faulty_run.now_s += 30.0
    faulty_run.begin(120, seconds=5.0)
    faulty_run.steps(121, 122)
    found = viewed(faulty_run)["spent_s"]
    assert found["restart"] == pytest.approx(4.0 + 3.0)
    assert found["init"] == pytest.approx(3.0 + 5.0)


def test_a_step_far_slower_than_usual_is_unusual_and_the_first_of_an_attempt_is_not(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 1, step_s=60.0)  # compiles
    fake_run.steps(2, 20)
    fake_run.steps(21, 22, step_s=50.0)
    fake_run.steps(23, 40, step_s=3.0)  # a slower phase is not a slow step
    fake_run.begin(40)
    fake_run.steps(41, 41, step_s=60.0)
    found = viewed(fake_run)
    [entry] = found["unusual"]
    assert (entry["kind"], entry["step"], entry["last_step"]) == ("slow step", 21, 22)
    assert entry["text"] == "the step took 50 s, 50 times the usual 1 s"
    assert [mark["step"] for mark in found["marks"]] == [21]


def test_a_run_begun_on_two_ranks_stays_a_run_of_two_ranks(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 3)
    known = {"backend": "none", "device": "cpu", "parameters": 8, "sequence_index": 24}
    fake_run.event("run_started", step=3, world=1, attempt=0, **known, run_sha256="r", data_sha256="d")
    fake_run.steps(4, 5)
    facts = viewed(fake_run)["facts"]
    assert (facts["ranks"], facts["ranks_now"]) == (2, 1)


def test_a_reused_folder_is_read_from_the_start(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 20)
    run = RunView("run", fake_run.run_dir)
    run.refresh()
    (fake_run.run_dir / "events" / "rank-00000.jsonl").unlink()
    fake_run.begin()
    fake_run.steps(1, 3)
    while run.refresh():
        pass
    assert run.data(fake_run.now_s, points=10)["step"] == 3


def test_a_window_of_steps_has_all_its_points(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 500)
    run = RunView("run", fake_run.run_dir)
    run.refresh()
    whole = run.data(fake_run.now_s, points=50)["curves"]["loss"]["step"]
    part = run.data(fake_run.now_s, points=50, window=(100.0, 140.0))["curves"]["loss"]["step"]
    assert len(whole) <= 50
    assert part == list(range(100, 141))


def test_several_runs_are_listed_newest_first(tmp_path: Path, new_fake_run: Callable[[Path], Any]) -> None:
    for number, name in enumerate(("a", "deep/er/b")):
        run = new_fake_run(tmp_path / name)
        run.now_s += number
        run.begin()
        run.steps(1, 5)
    (tmp_path / "a" / "checkpoints" / "events").mkdir(parents=True)  # not a run
    runs = RunCollection(str(tmp_path))
    runs.read_all()
    data = runs.data()
    assert [run["name"] for run in data["runs"]] == ["deep/er/b", "a"]
    assert [run["name"] for run in runs.data(["a"])["details"]] == ["a"]


def test_a_refresh_ends_with_its_budget_and_the_next_one_goes_on(
    fake_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.dashboard.run_view.RECORDS_AT_ONCE", 16)
    fake_run.begin()
    fake_run.steps(1, 100)
    view, seen = RunView("run", fake_run.run_dir), []
    while view.refresh(0.0):
        seen.append(view.counts.get("step_done", 0))
    assert len(seen) >= 6, "each adds 16 records"
    assert view.counts["step_done"] == 100
    whole = RunView("run", fake_run.run_dir)
    assert whole.refresh(60.0) is False
    assert view.data(fake_run.now_s, points=50)["curves"] == whole.data(fake_run.now_s, points=50)["curves"]


def test_a_lost_rank_counts_after_it_has_joined_again(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 4)
    fake_run.event("ranks_lost", step=4, lost=[1], left=1, reason="rank 1 died", seconds=0.5)
    assert (viewed(fake_run)["losses"], viewed(fake_run)["lost_ranks"]) == (1, 1)
    fake_run.event("ranks_joined", step=5, joined=[1], ranks=2, seconds=0.1)
    assert (viewed(fake_run)["losses"], viewed(fake_run)["lost_ranks"]) == (1, 0)


def test_the_predicted_step_time_is_that_of_the_last_attempt(faulty_run: Any) -> None:
    assert viewed(faulty_run)["predicted"] is None, "an earlier version wrote none"
    for step_s in (2.0, 1.5):
        faulty_run.event("step_predicted", step_s=step_s, low_s=1.0, high_s=3.0, basis="factor 0.781")
    found = viewed(faulty_run)
    assert found["predicted"] == {"step_s": 1.5, "low_s": 1.0, "high_s": 3.0, "basis": "factor 0.781"}
    assert not any("predicted" in entry["text"] for entry in found["history"])
    faulty_run.event("step_predicted", step_s=None, low_s=None, high_s=None, basis="this run is on a CPU")
    assert viewed(faulty_run)["predicted"]["step_s"] is None


def test_new_and_removed_runs_are_noticed(
    tmp_path: Path, new_fake_run: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.dashboard.runs.FIND_RUNS_EVERY_S", -1.0)
    runs = RunCollection(str(tmp_path))
    assert runs.names == []
    new_fake_run(tmp_path / "folder" / "a").begin()
    runs.refresh()
    assert runs.names == ["folder/a"]
    shutil.rmtree(tmp_path / "folder")
    new_fake_run(tmp_path / "b").begin()
    runs.refresh()
    assert runs.names == ["b"]
    shutil.rmtree(tmp_path)
    runs.refresh()  # the folder is gone: no error


def test_folders_without_permission_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "run" / "events").mkdir(parents=True)
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert RunCollection(str(tmp_path)).names == ["run"]


def test_the_saved_page_contains_its_data_and_loads_nothing(faulty_run: Any) -> None:
    faulty_run.event("teleported", reason="</script><script>alert(1)</script><!--")
    text = page({"details": [viewed(faulty_run)], "runs": [], "folder": "x", "lakh": "0", "time_s": 0.0})
    assert text.count("</script>") == 3  # data, uPlot, ours
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert "https://" not in text.replace("https://github.com/leeoniya/uPlot", "")  # in a comment
    assert "Leon Sorokin" in text  # a saved page is a copy of uPlot, so its notice is there
    assert "/*" not in text.split("<script")[1]
