"""Sinks: show the events of a run in TensorBoard, Prometheus, Weights & Biases and MLflow (train.sinks).

A sink reads RUN/events in a thread of rank 0, so that it works under every launcher. A sink that fails prints a warning
and stops; the run continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from lakh import events, storage
from lakh.errors import LakhError, MissingExtra, UserError
from lakh.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    HookMetrics,
    NetworkTraffic,
    RanksLost,
    Resources,
    Restarted,
    Rewound,
    RunStarted,
    StepDone,
    StepSkipped,
)
from lakh.metrics import MetricsRegistry
from lakh.spec import Training

__all__ = ["MlflowSink", "PrometheusSink", "Sink", "TensorBoardSink", "WandbSink", "export_events"]

POLL_S = 0.5
STOP_TIMEOUT_S = 60.0  # W&B's own process writes its last records when a run ends
STEP_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Sink(Protocol):
    def export(self, event: Event) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def export_events(settings: Training, run_dir: str | Path, *, rank: int) -> Iterator[None]:
    """Export events to the sinks of a run inside the block; on rank 0 only."""
    if rank != 0 or not settings.sinks:
        yield
        return
    makers = {
        "tensorboard": lambda: TensorBoardSink(Path(run_dir) / "tensorboard"),
        "prometheus": lambda: PrometheusSink(settings.prometheus_port, run_dir),
        "wandb": lambda: WandbSink(Path(run_dir)),
        "mlflow": lambda: MlflowSink(Path(run_dir)),
    }
    sinks = [makers[name]() for name in dict.fromkeys(settings.sinks)]
    ended = threading.Event()
    thread = threading.Thread(target=_export, args=(sinks, run_dir, ended), name="lakh-sinks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(STOP_TIMEOUT_S)


def _export(sinks: list[Sink], run_dir: str | Path, ended: threading.Event) -> None:
    active = list(sinks)
    for event in events.follow(run_dir, rank=0, since_s=time.time(), poll_s=POLL_S, until=ended.is_set):
        for sink in list(active):
            try:
                sink.export(event)
            except (OSError, ValueError, LakhError) as error:
                print(f"warning: {type(sink).__name__}: {error}; the run continues without it", file=sys.stderr)  # noqa: T201
                active.remove(sink)
    for sink in active:
        with contextlib.suppress(OSError):
            sink.close()


# TensorBoard tag -> the event and field that it shows.
TAGS: dict[str, tuple[type[Event], str]] = {
    "train/loss": (StepDone, "loss"),
    "train/lr": (StepDone, "lr"),
    "train/grad_norm": (StepDone, "grad_norm"),
    "speed/tokens_per_s": (StepDone, "tokens_per_s"),
    "speed/step_s": (StepDone, "step_s"),
    "speed/mfu": (StepDone, "mfu"),
    "data/wait_s": (StepDone, "data_wait_s"),
    "heldout/loss": (Evaluated, "loss"),
    "checkpoint/seconds": (CheckpointSaved, "seconds"),
    "checkpoint/bytes": (CheckpointSaved, "bytes"),
    "memory/bytes": (Resources, "memory_bytes"),
    "data/ready": (Resources, "data_ready"),
    "data/starved": (Resources, "data_starved"),
}


class TensorBoardSink:
    """RUN/tensorboard: one event file per attempt, written by tensorboardX."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter  # an optional dependency
        except ModuleNotFoundError:
            raise MissingExtra("train.sinks = tensorboard", "tensorboardX", "train") from None
        self._writer = SummaryWriter(str(folder))

    def export(self, event: Event) -> None:
        for tag, value in scalars(event).items():
            self._writer.add_scalar(tag, value, event.step, walltime=event.time_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by their TensorBoard tag."""
    if isinstance(event, NetworkTraffic):
        return {f"traffic/{tier}_bytes": float(count) for tier, count in event.sent_bytes.items()}
    if isinstance(event, HookMetrics):
        return {f"hooks/{key}": float(value) for key, value in event.values.items()}
    found = {tag: getattr(event, field) for tag, (kind, field) in TAGS.items() if isinstance(event, kind)}
    return {tag: float(value) for tag, value in found.items() if value is not None}


class WandbSink:
    """RUN/wandb, written by wandb: offline unless WANDB_MODE says otherwise. `wandb sync RUN/wandb/*` uploads it.

    All attempts of a run have one id. The step is a value of its own, because wandb's own step cannot go back.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            import wandb  # an optional dependency
        except ModuleNotFoundError:
            raise MissingExtra("train.sinks = wandb", "wandb", "wandb") from None
        self._errors = wandb.Error
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        name = run_dir.resolve().name
        try:
            settings = wandb.Settings(mode=mode, silent=True)
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "lakh"), name=name, dir=str(run_dir), settings=settings,
                id=hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16], resume="allow",
            )  # fmt: skip
        except (wandb.Error, ValueError) as error:
            raise UserError("train.sinks = wandb", f"wandb cannot start ({error})", "set WANDB_MODE=offline") from None
        self._run.define_metric("*", step_metric="step")

    def export(self, event: Event) -> None:
        values = scalars(event)
        if not values:
            return
        try:
            self._run.log({"step": event.step, **values})
        except self._errors as error:
            raise OSError(str(error)) from None

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow: the server of MLFLOW_TRACKING_URI, or the folder RUN/mlflow. All attempts are one run of MLflow."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from mlflow import MlflowClient  # an optional dependency
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
        except ModuleNotFoundError:
            raise MissingExtra("train.sinks = mlflow", "mlflow", "mlflow") from None
        self._errors, self._metric = MlflowException, Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run_dir.resolve() / "mlflow").as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it
        tag = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        try:
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "lakh"))
            known = self._client.search_runs([experiment], f"tags.lakh_run = '{tag}'", max_results=1)
            self._id = known[0].info.run_id if known else self._new_run(experiment, run_dir.resolve().name, tag)
        except MlflowException as error:
            todo = "correct MLFLOW_TRACKING_URI, or unset it"
            raise UserError("train.sinks = mlflow", f"MLflow cannot start at {uri} ({error})", todo) from None

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _new_run(self, experiment: str, name: str, tag: str) -> str:
        return str(self._client.create_run(experiment, run_name=name, tags={"lakh_run": tag}).info.run_id)

    def export(self, event: Event) -> None:
        at_ms = int(event.time_s * 1000)
        values = [self._metric(name, value, at_ms, event.step) for name, value in scalars(event).items()]
        if not values:
            return
        try:
            self._client.log_batch(self._id, metrics=values)
        except self._errors as error:
            raise OSError(str(error)) from None

    def close(self) -> None:
        with contextlib.suppress(self._errors):
            self._client.set_terminated(self._id)


# Prometheus name -> the event and field that it shows, and its help text. Counters add the field, or 1 without one.
GAUGES: dict[str, tuple[type[Event], str, str]] = {
    "step": (StepDone, "step", "optimizer updates so far"),
    "loss": (StepDone, "loss", "training loss in nats per token"),
    "grad_norm": (StepDone, "grad_norm", "gradient norm before clipping"),
    "learning_rate": (StepDone, "lr", "learning rate"),
    "mfu_ratio": (StepDone, "mfu", "causal-exact model FLOPs over the dense peak"),
    "tokens_per_second": (StepDone, "tokens_per_s", "tokens per second over all ranks"),
    "heldout_loss": (Evaluated, "loss", "held-out loss in nats per token"),
    "memory_bytes": (Resources, "memory_bytes", "peak memory of rank 0"),
    "data_ready_batches": (Resources, "data_ready", "prefetched batches"),
    "data_starved_steps": (Resources, "data_starved", "steps whose batch was not ready in time"),
    "ranks": (RunStarted, "world", "ranks of this attempt when it started"),
    "last_step_time_seconds": (StepDone, "time_s", "when the last step ended, in seconds since 1970"),
    "last_checkpoint_time_seconds": (CheckpointSaved, "time_s", "when the last checkpoint was complete"),
}
COUNTERS: dict[str, tuple[type[Event], str, str]] = {
    "data_wait_seconds": (StepDone, "data_wait_s", "time spent waiting for data"),
    "steps_skipped": (StepSkipped, "", "skipped updates"),
    "restarts": (Restarted, "", "restarts of all ranks by the launcher"),
    "straggler_seconds": (StepDone, "straggler_s", "time that the mean rank waited for the slowest one"),
    "rewinds": (Rewound, "", "returns to an earlier step"),
    "ranks_lost_events": (RanksLost, "", "losses of ranks without a restart"),
    "checkpoint_seconds": (CheckpointSaved, "seconds", "time that training paused for checkpoints"),
    "checkpoint_failures": (CheckpointFailed, "", "checkpoints that could not be written"),
}


class PrometheusSink:
    """http://HOST:PORT/metrics; RUN/prometheus.json holds the port."""

    def __init__(self, port: int, run_dir: str | Path) -> None:
        metrics = MetricsRegistry("lakh_", process=True)
        self._step_seconds = metrics.histogram("step_seconds", "time of one step", STEP_SECONDS_BUCKETS)
        self._gauges = {name: metrics.gauge(name, text) for name, (_, _, text) in GAUGES.items()}
        self._counters = {name: metrics.counter(f"{name}_total", text) for name, (_, _, text) in COUNTERS.items()}
        self._tokens = metrics.counter("tokens_total", "tokens trained on")
        self._sent = metrics.gauge("step_sent_bytes", "bytes that rank 0 sends in one step", ["tier"])
        self._server = metrics.serve(port, "0.0.0.0", setting="train.prometheus_port")
        document = json.dumps({"port": self._server.port}).encode()
        storage.write_bytes(storage.join(run_dir, "prometheus.json"), document)
        self._last_tokens = 0

    def export(self, event: Event) -> None:
        for name, (kind, field, _) in GAUGES.items():
            if isinstance(event, kind) and (value := getattr(event, field)) is not None:
                self._gauges[name].set(value)
        for name, (kind, field, _) in COUNTERS.items():
            if isinstance(event, kind):
                self._counters[name].inc(getattr(event, field) if field else 1)
        if isinstance(event, StepDone):
            self._step_seconds.observe(event.step_s)
            self._tokens.inc(max(0, event.tokens - self._last_tokens) if self._last_tokens else 0)
            self._last_tokens = event.tokens
        elif isinstance(event, NetworkTraffic):
            for tier, count in event.sent_bytes.items():
                self._sent.labels(tier).set(count)

    def close(self) -> None:
        self._server.close()
