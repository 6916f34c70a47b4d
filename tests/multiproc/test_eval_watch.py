"""Checkpoints of a real run, scored as they appear, with bits per byte and line completion of the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lakh import events
from lakh.cli import main
from lakh.evals.watch import WATCHER_RANK
from lakh.events import Scored


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_checkpoint_is_evaluated_once_and_reported_as_an_event(
    run_lakh, tiny_recipe: Path, code_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lakh_here(*words: str) -> dict[str, Any]:
        """The command in this process: torch is imported once."""
        with pytest.raises(SystemExit) as left:
            main([*words, "--json"])
        assert left.value.code == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    run = tmp_path / "run"
    run_lakh("train", str(tiny_recipe), "--out", str(run), "--nproc", "1")
    tasks = ["--task", "line-completion,bits-per-byte"]
    words = ["eval", "watch", str(run), *tasks, "--data", str(code_dir), "--limit", "6"]
    found = lakh_here(*words, "--max-tokens", "8", "--once", "--every", "4")
    steps = [row["step"] for row in found["results"] if row["task"] == "line-completion"]
    assert steps == sorted(steps, reverse=True)
    assert 12 in steps
    told = [event for event in events.read(run, WATCHER_RANK) if isinstance(event, Scored)]
    assert sorted(event.step for event in told) == sorted(steps)
    assert {event.task for event in told} == {"line-completion"}
    assert all(event.total == 6 for event in told)
    result = json.loads((run / "evals" / "00000012" / "line-completion" / "result.json").read_text())
    assert result["settings"]["max_tokens"] == 8
    assert lakh_here(*words, "--max-tokens", "8", "--once")["results"] == []

    bits = lakh_here("eval", str(run), "--task", "bits-per-byte", "--texts", str(code_dir), "--limit", "6")
    measured = {event.step: event for event in events.read(run, WATCHER_RANK) if isinstance(event, events.HookMetrics)}
    assert sorted(measured) == sorted(steps)
    assert measured[12].values["bits_per_byte"] == pytest.approx(bits["bits_per_byte"])  # the newest is what a run is
    assert 0 < bits["bits_per_byte"] < 8
    assert bits["interval"][0] <= bits["bits_per_byte"] <= bits["interval"][1]
    uniform = math.log2(512) * bits["tokens"] / bits["bytes"]
    assert bits["bits_per_byte"] < uniform  # twelve steps teach it something
