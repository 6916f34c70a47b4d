"""Scoring checkpoints during training: order, once each, and removed checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lakh import events
from lakh.cli import main
from lakh.errors import DataError, LakhError, UserError
from lakh.evals.sandbox import Sandbox
from lakh.evals.scoring.protocol import Origin
from lakh.evals.task import Task
from lakh.evals.watch import curve, watch
from lakh.server.engine import Completion

ORIGIN = Origin("run", temperature=0.0, seed=0, max_tokens=8)


class Learner:
    """Solves as many of the three problems as the step of its checkpoint."""

    max_seqs = 8

    def __init__(self, path: str) -> None:
        self._solved = int(Path(path).name)

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: str = "psm") -> str:
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[str],
        samplings: Sequence[Any],
        *,
        stop_when: Callable[[str], bool] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        numbers = [int(prompt.split("adds ")[1].split()[0]) for prompt in prompts]
        return [Completion(f"    return x + {n if n < self._solved else 99}", (), "stop", 1) for n in numbers]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder `saved` holds a folder for each checkpoint."""
    for step in (1, 2, 3):
        (tmp_path / "saved" / str(step)).mkdir(parents=True)

    def list_complete(folder: str) -> list[tuple[int, str]]:
        saved = Path(folder) / "saved"
        return sorted((int(path.name), str(path)) for path in saved.iterdir())

    monkeypatch.setattr("lakh.checkpoint.list_complete", list_complete)
    return tmp_path


def follow(run_dir: Path, task: Task, sandbox: Sandbox, **more: Any) -> int:
    return watch(str(run_dir), [task], sandbox, ORIGIN, until=lambda: True, load=more.pop("load", Learner), **more)


def test_every_checkpoint_is_scored_once_the_newest_first(run_dir: Path, toy_task: Task, sandbox: Sandbox) -> None:
    seen: list[int] = []
    assert follow(run_dir, toy_task, sandbox, on_result=lambda step, _: seen.append(step)) == 3
    assert seen == [3, 2, 1]
    assert follow(run_dir, toy_task, sandbox) == 0
    (run_dir / "saved" / "4").mkdir()
    assert follow(run_dir, toy_task, sandbox) == 1
    found = curve(str(run_dir))
    assert [(event.step, event.passed, event.total) for event in found] == [(1, 1, 3), (2, 2, 3), (3, 3, 3), (4, 3, 3)]
    assert found[0].low is not None
    assert (run_dir / "evals" / "00000002" / "toy" / "result.json").exists()
    assert curve(str(run_dir), "another") == []


def test_every_selects_steps(run_dir: Path, toy_task: Task, sandbox: Sandbox) -> None:
    assert follow(run_dir, toy_task, sandbox, every=2) == 1
    assert [event.step for event in curve(str(run_dir))] == [2]


def test_a_model_is_loaded_once_for_all_its_tasks(run_dir: Path, toy_task: Task, sandbox: Sandbox) -> None:
    from dataclasses import replace

    loads: list[str] = []

    def load(path: str) -> Learner:
        loads.append(Path(path).name)
        return Learner(path)

    tasks = [toy_task, replace(toy_task, name="toy2")]
    assert watch(str(run_dir), tasks, sandbox, ORIGIN, until=lambda: True, load=load) == 6
    assert loads == ["3", "2", "1"]


def test_a_removed_checkpoint_is_skipped(run_dir: Path, toy_task: Task, sandbox: Sandbox) -> None:
    skipped: list[str] = []

    def load(path: str) -> Learner:
        if path.endswith("3"):
            shutil.rmtree(path)
            raise DataError(path, "is not complete", "use another")
        return Learner(path)

    def skip(path: str, error: LakhError) -> None:
        skipped.append(Path(path).name)

    assert follow(run_dir, toy_task, sandbox, load=load, on_skip=skip) == 2
    assert skipped == ["3"]


TEXTS = [("a.py", "x = 1\n")]


def measure_by_step(path: str, given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    assert given == TEXTS
    bits = 48.0 / int(Path(path).name)
    interval = [bits / 6 - 0.1, bits / 6 + 0.1]
    return {"task": "bits-per-byte", "bits_per_byte": bits / 6, "interval": interval, "bytes": 6}


def test_bits_per_byte_alone_needs_no_sandbox(run_dir: Path) -> None:
    def load(path: str) -> Learner:
        raise AssertionError("nothing is generated")

    more = {"until": lambda: True, "texts": TEXTS, "measure": measure_by_step, "load": load}
    assert watch(str(run_dir), [], None, ORIGIN, **more) == 3
    assert watch(str(run_dir), [], None, ORIGIN, **more) == 0


def test_bits_per_byte_is_measured_once_per_checkpoint(run_dir: Path, toy_task: Task, sandbox: Sandbox) -> None:
    seen: list[tuple[int, str]] = []
    more = {
        "texts": TEXTS,
        "measure": measure_by_step,
        "on_result": lambda step, found: seen.append((step, found["task"])),
    }
    assert follow(run_dir, toy_task, sandbox, **more) == 6
    assert seen[:2] == [(3, "toy"), (3, "bits-per-byte")]
    assert follow(run_dir, toy_task, sandbox, **more) == 0
    found = [event for event in events.read(run_dir) if isinstance(event, events.HookMetrics)]
    assert [(event.step, event.values["bits_per_byte"]) for event in found] == [(3, 8 / 3), (2, 4.0), (1, 8.0)]
    assert found[1].values["high"] == pytest.approx(4.1)
    assert json.loads((run_dir / "evals" / "00000002" / "bits-per-byte" / "result.json").read_text())["bytes"] == 6


def test_the_curve_command_shows_the_scores(
    run_dir: Path, toy_task: Task, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(run_dir, toy_task, sandbox, texts=TEXTS, measure=measure_by_step)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "curve", str(run_dir), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [point["step"] for point in found["points"]] == [1, 2, 3]
    assert [point["bits_per_byte"] for point in found["bits_per_byte"]] == [8.0, 4.0, 8 / 3]
    with pytest.raises(SystemExit):
        main(["eval", "curve", str(run_dir)])
    drawn = capsys.readouterr().out
    assert "3 of 3" in drawn
    assert "2.6667" in drawn


def test_a_run_without_scores_and_a_missing_folder(tmp_path: Path) -> None:
    with events.EventLog(tmp_path, 0):
        pass
    assert curve(str(tmp_path)) == []
    with pytest.raises(UserError, match="no such folder"):
        curve(str(tmp_path / "none"))
