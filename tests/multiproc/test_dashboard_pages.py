"""Every page of the dashboard in Chromium, on a run that trains and on the same run when it is done."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.browser import needs_chromium
from tests.dashboard_pages import check_pages

from lakh import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 100.0


@needs_chromium
def test_pages_of_a_live_and_of_a_finished_run_show_what_its_events_say(
    tiny_recipe: Path, tmp_path: Path, run_launcher
) -> None:
    run_dir = tmp_path / "run"
    train = ["train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "2", "--set", "train.steps=100000"]
    # It trains as fast as it can for as long as the browser looks at it: the browser goes first.
    process = subprocess.Popen(["nice", "-n", "19", sys.executable, "-m", "lakh", *train])
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not any(isinstance(event, events.Evaluated) and event.step for event in events.read(run_dir, rank=0)):
            assert process.poll() is None
            assert time.monotonic() < deadline_s, "the run does not step"
            time.sleep(0.2)
        assert check_pages(run_dir, is_live=True) == ["Overview", "Goodput", "Fleet", "Data"]
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    step = max(event.step for event in events.read(run_dir, rank=0) if isinstance(event, events.StepDone))
    run_launcher("resume", str(run_dir), "--nproc", "2", "--set", f"train.steps={step + 3}")
    assert check_pages(run_dir, is_live=False) == ["Overview", "Goodput", "Fleet", "Data"]
