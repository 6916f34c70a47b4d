"""Event files of runs, written without a trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START_S = 1_800_000_000.0


def bits(step: int) -> dict[str, float]:
    value = 2.0 - step / 200
    return {"bits_per_byte": value, "low": value - 0.1, "high": value + 0.1}


class FakeRun:
    """Writes events of one run; each event advances the clock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.now_s = START_S
        (run_dir / "events").mkdir(parents=True, exist_ok=True)

    def event(self, kind: str, *, step: int = 0, rank: int = 0, after_s: float = 0.0, **fields: Any) -> None:
        self.now_s += after_s
        record = {"time_s": self.now_s, "rank": rank, "step": step, "kind": kind, **fields}
        with (self.run_dir / "events" / f"rank-{rank:05d}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def begin(self, step: int = 0, *, attempt: int = 0, seconds: float = 3.0) -> None:
        self.event("initialised", step=step, after_s=seconds, seconds=seconds)
        known = {"backend": "gloo", "device": "cpu", "parameters": 2_361_024, "sequence_index": step * 8}
        self.event("run_started", step=step, world=2, attempt=attempt, **known, run_sha256="r", data_sha256="d")

    def steps(self, first: int, last: int, *, step_s: float = 1.0, loss: Callable[[int], float] | None = None) -> None:
        for step in range(first, last + 1):
            value = loss(step) if loss else 4.0 + 4.0 / step
            known = {"lr": 1e-3, "grad_norm": 1.0 + 0.01 * (step % 7), "tokens": 2048 * step, "mfu": None}
            rates = {"tokens_per_s": 2048 / step_s, "step_s": step_s, "data_wait_s": 0.1 * step_s}
            self.event("step_done", step=step, after_s=step_s, loss=value, **known, **rates)


def write_evaluation(folder: Path, verdicts: list[tuple[str, str, str]]) -> None:
    """A folder as lakh eval --out writes it; verdicts are (task id, text of the sample, kind)."""
    folder.mkdir(parents=True)
    passed = sum(kind == "passed" for _, _, kind in verdicts)
    kinds = {kind: sum(found == kind for _, _, found in verdicts) for kind in ("passed", "failed", "timeout")}
    result = {"task": "humaneval", "passed": passed, "total": len(verdicts), "interval": [0.1, 0.9], "kinds": kinds,
              "pass_at_k": {"1": passed / len(verdicts)}, "sandbox": "bubblewrap", "protocol": "n=1"}  # fmt: skip
    samples = [{"task_id": name, "completion": text} for name, text, _ in verdicts]
    detail = [{"task_id": name, "kind": kind, "detail": f"{kind} because"} for name, _, kind in verdicts]
    (folder / "result.json").write_text(json.dumps(result))
    for name, rows in (("samples", samples), ("verdicts", detail)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder: Path) -> Path:
    """A corpus and the tokens that were packed from it, as manifests alone; returns the folder of the tokens."""
    redacted = [{"place": "a.py", "before": "me@••••", "after": "EMAIL"}]
    corpus = {"format": "lakh-corpus/2", "output_sha256": "c0", "read": 100, "kept": 60, "bytes_in": 5e6,
              "bytes_out": 3e6, "dropped": {"not-code": 30, "licence": 10, "empty": 0},
              "dropped_bytes": {"not-code": 2e6}, "secrets": {"email": 3}, "languages": {"python": 60},
              "licences": {"MIT": 60}, "samples": redacted}  # fmt: skip
    splits = {"heldout": {"documents": 5, "tokens": 900}, "train": {"documents": 55, "tokens": 1_500_000}}
    for name, manifest in (("corpus", corpus), ("tokens", {"corpus_sha256": "c0", "vocab": 4096, "splits": splits})):
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text(json.dumps(manifest))
    return folder / "tokens"


@pytest.fixture
def new_evaluation() -> Callable[[Path, list[tuple[str, str, str]]], None]:
    return write_evaluation


@pytest.fixture
def new_data() -> Callable[[Path], Path]:
    return write_data


@pytest.fixture
def new_fake_run() -> Callable[[Path], FakeRun]:
    return FakeRun


@pytest.fixture
def fake_run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")


@pytest.fixture
def faulty_run(fake_run: FakeRun) -> FakeRun:
    """120 steps: a rank killed at step 70 costs steps 51 to 70; checkpoints at 50 and 100, and scores of both."""
    (fake_run.run_dir / "run.toml").write_text('name = "small"\n[train]\nsteps = 120\n')
    fake_run.begin()
    fake_run.steps(1, 50)
    fake_run.event("evaluated", step=50, after_s=2.0, loss=4.2, sequences=32, seconds=2.0)
    fake_run.event("checkpoint_saved", step=50, after_s=1.0, path="step-50", bytes=10, seconds=1.0)
    fake_run.steps(51, 70)
    fake_run.event("fault_struck", step=70, rank=1, fault="kill(rank=1, step=70)")
    fake_run.event("restarted", after_s=4.0, attempt=1, reason="rank 1 was killed by SIGKILL")
    fake_run.begin(50, attempt=1)
    fake_run.steps(51, 100)
    fake_run.event("evaluated", step=100, after_s=2.0, loss=4.1, sequences=32, seconds=2.0)
    fake_run.event("checkpoint_saved", step=100, after_s=1.0, path="step-100", bytes=10, seconds=1.0)
    for step, passed in ((50, 1), (100, 3)):
        result = {"pass_at_1": passed / 10, "low": passed / 20, "high": passed / 5, "passed": passed, "total": 10}
        fake_run.event("scored", step=step, rank=99_999, task="humaneval", **result, seconds=1.0, path="x")
        fake_run.event("measured", step=step, rank=99_999, hook="bits-per-byte", values=bits(step))
    fake_run.steps(101, 120)
    fake_run.event("run_ended", step=120, reason="last step done", seconds=130.0)
    return fake_run
