"""deploy/skypilot and deploy/ray: their commands, with fake programs; the real ones where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lakh import events

ROOT = Path(__file__).resolve().parents[2]
SKYPILOT = ROOT / "deploy" / "skypilot" / "train.yaml"
TIMEOUT_S = 200
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
TASK_KEYS = {"name", "num_nodes", "resources", "envs", "run", "setup", "file_mounts", "volumes", "workdir"}


def test_the_skypilot_task_starts_torchrun_on_every_node_and_resumes(tmp_path: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    assert task.keys() <= TASK_KEYS
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    run_dir = tmp_path / "run"
    variables = {key: str(value) for key, value in task["envs"].items()} | {
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "RUN_DIR": str(run_dir),
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "sky-1",
    }

    def start() -> str:
        words = ["bash", "-c", task["run"]]
        return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=30, check=True).stdout

    started = start()
    assert "-m lakh.trainer.torchrun --nnodes 2 --nproc-per-node 8" in started
    assert "--rdzv-endpoint 10.0.0.4:29400" in started
    assert started.strip().endswith(f"-m lakh train node --out {run_dir}")
    (run_dir / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}")
    assert start().strip().endswith(f"-m lakh resume {run_dir}")


@pytest.mark.slow
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    pytest.importorskip("sky", reason="SkyPilot is not installed; it is no dependency of lakh")
    script = "import json, sky, sys; task = sky.Task.from_yaml(sys.argv[1]); [one] = task.resources; "
    script += "print(json.dumps([task.num_nodes, one.accelerators, task.envs['RECIPE']]))"
    command = [sys.executable, "-c", script, str(SKYPILOT)]
    variables = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [2, {"H100": 8}, "node"]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S + 60)
def test_ray_trains_and_resumes_on_a_local_cluster(tiny_recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; it is no dependency of lakh")
    run_dir = tmp_path / "run"
    words = [sys.executable, str(ROOT / "deploy" / "ray" / "train.py"), "--gpus", "0", "--ranks", "2", "--cpus", "1"]
    for steps in (6, 12):
        command = [*words, str(tiny_recipe), str(run_dir), "--set", f"train.steps={steps}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    written = events.read(run_dir)
    assert [event.step for event in written if isinstance(event, events.StepDone)] == list(range(1, 13))
    assert {event.world for event in written if isinstance(event, events.RunStarted)} == {2}
