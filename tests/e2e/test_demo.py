"""The demo runs every stage, continues after Ctrl-C, and reuses finished stages."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.browser import CHROMIUM
from tests.dashboard_pages import check_pages

from lakh import events

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20  # the fewest that lakh demo takes


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lakh", "demo", "--dir", str(folder), "--steps", str(STEPS), "--json"]
    # Enough text for the vocabulary and the steps, and minutes less than the standard library.
    command += ["--source", str(ROOT / "src/lakh/server"), "--source", str(ROOT / "src/lakh/planner")]
    # A session of its own, so that the signal can go to all its processes as a terminal would send it.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_an_interrupted_demo_continues_and_a_finished_one_is_reused(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = start(folder)
    deadline = time.monotonic() + 400
    while not [e for e in events.read(folder / "run") if isinstance(e, events.RanksLost)]:
        assert process.poll() is None
        assert time.monotonic() < deadline, "nobody went on without the killed rank"
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert "run lakh demo again" in err
    assert "Traceback" not in err

    process = start(folder)
    if CHROMIUM is not None:  # while it trains on
        assert {"Overview", "Goodput", "Fleet", "Data"} <= set(check_pages(folder / "run", is_live=True))
    told = {stage["name"]: stage for stage in finish(process)["stages"]}
    assert [name for name, stage in told.items() if stage["reused"]] == ["corpus", "tokenizer", "tokens", "serve"]
    assert f"kill(rank=1, step={STEPS * 2 // 5}) survived without a restart" in told["train"]["summary"]
    assert told["train"]["result"]["steps"] == STEPS
    if "not_run" in told["sandbox"]:
        assert "bubblewrap" in told["sandbox"]["not_run"]
    else:
        assert told["sandbox"]["result"]["passed"] == told["sandbox"]["result"]["total"] == 164
        assert 0 <= told["eval"]["result"]["pass_at_k"]["1"] <= 1
    assert (folder / "export" / "config.json").exists()
    assert told["serve"]["result"]["completion"]

    if CHROMIUM is not None:
        assert {"Overview", "Goodput", "Fleet", "Data"} <= set(check_pages(folder / "run", is_live=False))

    again = {stage["name"]: stage for stage in finish(start(folder))["stages"]}
    assert all(stage["reused"] or "not_run" in stage for stage in again.values())
    assert again["train"]["result"] == told["train"]["result"]
