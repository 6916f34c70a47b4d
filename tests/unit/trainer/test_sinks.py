"""Sinks: TensorBoard files and the Prometheus page of a run."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from lakh.errors import MissingExtra, UserError
from lakh.events import Evaluated, EventLog, NetworkTraffic, Resources, StepDone, StepSkipped
from lakh.spec import Training
from lakh.trainer.observability.sinks import export_events


def write_some(run_dir: Path, steps: int = 3) -> None:
    with EventLog(run_dir) as log:
        for step in range(1, steps + 1):
            log.write(
                StepDone(
                    step=step,
                    loss=5.0 - step,
                    lr=0.1,
                    grad_norm=2.0,
                    tokens=100 * step,
                    tokens_per_s=50.0,
                    step_s=2.0,
                    data_wait_s=0.5,
                )
            )
        log.write(Resources(step=steps, memory_bytes=12345, data_ready=7, data_starved=1))
        log.write(NetworkTraffic(step=1, sent_bytes={"node": 700, "rack": 200}))
        log.write(StepSkipped(step=steps, reason="gradient norm nan is not finite"))
        log.write(Evaluated(step=steps, loss=2.5, sequences=4, seconds=1.0))


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX to run this")
    board = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard to run this"
    )
    with export_events(Training(sinks=("tensorboard",)), tmp_path, rank=0):
        write_some(tmp_path)
    read = board.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(s.step, s.value) for s in read.Scalars("train/loss")] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert read.Scalars("heldout/loss")[0].value == 2.5
    assert read.Scalars("memory/bytes")[0].value == 12345


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'lakh[wandb]'")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with export_events(Training(sinks=("wandb",)), tmp_path, rank=0):
        write_some(tmp_path)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = run.glob("run-*.wandb")
    written = log.read_bytes()
    for name in (b"train/loss", b"heldout/loss", b"memory/bytes", b"step"):
        assert name in written


@pytest.mark.slow
def test_all_attempts_are_one_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install 'lakh[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        with export_events(Training(sinks=("mlflow",)), tmp_path, rank=0):
            write_some(tmp_path)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("lakh").experiment_id])
    assert run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(row.step, row.value) for row in losses] == 2 * [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert run.data.metrics["heldout/loss"] == 2.5


def test_a_mode_that_wandb_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'lakh[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with (
        pytest.raises(UserError, match="WANDB_MODE=offline"),
        export_events(Training(sinks=("wandb",)), tmp_path, rank=0),
    ):
        pass


def test_a_missing_package_is_an_error_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with (
        pytest.raises(MissingExtra, match="needs the package tensorboardX"),
        export_events(Training(sinks=("tensorboard",)), tmp_path, rank=0),
    ):
        pass


@pytest.mark.slow
def test_prometheus_scrapes_the_run(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="pip install prometheus_client to run this")
    with export_events(Training(sinks=("prometheus",), prometheus_port=0), tmp_path, rank=0):
        port = json.loads((tmp_path / "prometheus.json").read_text())["port"]
        write_some(tmp_path)
        page, deadline = "", time.monotonic() + 20
        while "lakh_heldout_loss 2.5" not in page and time.monotonic() < deadline:
            time.sleep(0.1)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                page = answer.read().decode()
        for line in (
            "lakh_loss 2.0",
            "lakh_step 3.0",
            "lakh_step_seconds_count 3.0",
            "lakh_data_wait_seconds_total 1.5",
            "lakh_steps_skipped_total 1.0",
            "lakh_memory_bytes 12345.0",
            "lakh_tokens_total 200.0",
            "lakh_data_starved_steps 1.0",
            'lakh_step_sent_bytes{tier="rack"} 200.0',
        ):
            assert line in page
        taken = Training(sinks=("prometheus",), prometheus_port=port)
        with pytest.raises(UserError, match="choose another"), export_events(taken, tmp_path, rank=0):
            pass


def test_other_ranks_and_runs_without_sinks_export_nothing(tmp_path: Path) -> None:
    with export_events(Training(sinks=("tensorboard",)), tmp_path, rank=1), export_events(Training(), tmp_path, rank=0):
        pass
    assert not list(tmp_path.iterdir())
