"""Where the events of a run are shown besides their files: TensorBoard and Prometheus.

A sink is a reader of RUN/events like any other, in a thread of rank 0 (`export_events`), so that it works the same under
every launcher. TensorBoard's files are written here (tensorboard.py), without the package; the Prometheus page needs
prometheus_client. A sink that fails says so once on stderr and leaves the run alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from lakh import events, storage
from lakh.errors import LakhError, MissingExtra, UserError
from lakh.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    HookMetrics,
    NetworkTraffic,
    Resources,
    Restarted,
    StepDone,
    StepSkipped,
)
from lakh.spec import Training
from lakh.trainer.observability.tensorboard import ScalarFile

__all__ = ["PrometheusSink", "Sink", "TensorBoardSink", "export_events"]

POLL_S = 0.5
STOP_TIMEOUT_S = 10.0
STEP_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Sink(Protocol):
    def show(self, event: Event) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def export_events(settings: Training, run_dir: str | Path, *, rank: int) -> Iterator[None]:
    """Feed the sinks that a run asks for while the block runs; on rank 0 only."""
    if rank != 0 or not settings.sinks:
        yield
        return
    makers = {
        "tensorboard": lambda: TensorBoardSink(Path(run_dir) / "tensorboard"),
        "prometheus": lambda: PrometheusSink(settings.prometheus_port, run_dir),
    }
    sinks = [makers[name]() for name in dict.fromkeys(settings.sinks)]
    ended = threading.Event()
    thread = threading.Thread(target=_feed, args=(sinks, run_dir, ended), name="lakh-sinks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(STOP_TIMEOUT_S)


def _feed(sinks: list[Sink], run_dir: str | Path, ended: threading.Event) -> None:
    working = list(sinks)
    for event in events.follow(run_dir, rank=0, since_s=time.time(), poll_s=POLL_S, until=ended.is_set):
        for sink in list(working):
            try:
                sink.show(event)
            except (OSError, ValueError, LakhError) as error:
                print(f"warning: {type(sink).__name__}: {error}; the run goes on without it", file=sys.stderr)  # noqa: T201
                working.remove(sink)
    for sink in working:
        with contextlib.suppress(OSError):
            sink.close()


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under the names that TensorBoard shows."""
    if isinstance(event, StepDone):
        named = {
            "train/loss": event.loss,
            "train/lr": event.lr,
            "train/grad_norm": event.grad_norm,
            "speed/tokens_per_s": event.tokens_per_s,
            "speed/step_s": event.step_s,
            "data/wait_s": event.data_wait_s,
        }
        return named | ({"speed/mfu": event.mfu} if event.mfu is not None else {})
    if isinstance(event, Evaluated):
        return {"heldout/loss": event.loss}
    if isinstance(event, CheckpointSaved):
        return {"checkpoint/seconds": event.seconds, "checkpoint/bytes": float(event.bytes)}
    if isinstance(event, Resources):
        return {
            "memory/bytes": float(event.memory_bytes),
            "data/ready": float(event.data_ready),
            "data/starved": float(event.data_starved),
        }
    if isinstance(event, NetworkTraffic):
        return {f"traffic/{tier}_bytes": float(count) for tier, count in event.sent_bytes.items()}
    if isinstance(event, HookMetrics):
        return {f"hooks/{key}": float(value) for key, value in event.values.items()}
    return {}


class TensorBoardSink:
    """RUN/tensorboard: one file of scalars per attempt."""

    def __init__(self, folder: Path) -> None:
        self._file = ScalarFile(folder)

    def show(self, event: Event) -> None:
        for tag, value in scalars(event).items():
            self._file.add(tag, value, step=event.step, time_s=event.time_s)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class PrometheusSink:
    """http://HOST:PORT/metrics; RUN/prometheus.json says which port it is."""

    def __init__(self, port: int, run_dir: str | Path) -> None:
        try:
            import prometheus_client as prometheus
        except ModuleNotFoundError:
            raise MissingExtra("train.sinks = prometheus", "prometheus_client", "train") from None
        self._registry = prometheus.CollectorRegistry()
        gauge, counter = prometheus.Gauge, prometheus.Counter
        self._steps = prometheus.Histogram(
            "lakh_step_seconds", "time of one step", buckets=STEP_SECONDS_BUCKETS, registry=self._registry
        )
        self._metrics: dict[str, Any] = {
            name: kind(f"lakh_{name}", text, registry=self._registry)
            for name, kind, text in (
                ("step", gauge, "optimizer updates so far"),
                ("loss", gauge, "training loss in nats per token"),
                ("heldout_loss", gauge, "held-out loss in nats per token"),
                ("grad_norm", gauge, "gradient norm before clipping"),
                ("learning_rate", gauge, "learning rate"),
                ("mfu_ratio", gauge, "causal-exact model FLOPs over the dense peak"),
                ("tokens_per_second", gauge, "tokens per second over all ranks"),
                ("memory_bytes", gauge, "most memory that rank 0 has used"),
                ("data_ready_batches", gauge, "batches read ahead"),
                ("data_starved_steps", gauge, "steps whose batch was not there when it was asked for"),
                ("tokens_total", counter, "tokens trained on"),
                ("data_wait_seconds_total", counter, "time spent waiting for data"),
                ("steps_skipped_total", counter, "updates that were left out"),
                ("restarts_total", counter, "times that the launcher started all ranks again"),
                ("checkpoint_seconds_total", counter, "time that training stood still for checkpoints"),
            )
        }
        self._sent = gauge("lakh_step_sent_bytes", "what rank 0 sends in one step", ["tier"], registry=self._registry)
        try:
            self._server, _ = prometheus.start_http_server(port, registry=self._registry)
        except OSError as error:
            found = f"cannot be listened on ({error.strerror})"
            raise UserError(f"train.prometheus_port = {port}", found, "choose another; 0 takes a free one") from None
        self.port = int(self._server.server_port)
        storage.write_bytes(storage.join(run_dir, "prometheus.json"), json.dumps({"port": self.port}).encode())
        self._tokens = 0

    def show(self, event: Event) -> None:
        metrics = self._metrics
        match event:
            case StepDone():
                self._steps.observe(event.step_s)
                metrics["step"].set(event.step)
                metrics["loss"].set(event.loss)
                metrics["grad_norm"].set(event.grad_norm)
                metrics["learning_rate"].set(event.lr)
                metrics["tokens_per_second"].set(event.tokens_per_s)
                metrics["data_wait_seconds_total"].inc(event.data_wait_s)
                metrics["tokens_total"].inc(max(0, event.tokens - self._tokens) if self._tokens else 0)
                self._tokens = event.tokens
                if event.mfu is not None:
                    metrics["mfu_ratio"].set(event.mfu)
            case Evaluated():
                metrics["heldout_loss"].set(event.loss)
            case StepSkipped():
                metrics["steps_skipped_total"].inc()
            case Restarted():
                metrics["restarts_total"].inc()
            case CheckpointSaved():
                metrics["checkpoint_seconds_total"].inc(event.seconds)
            case Resources():
                metrics["memory_bytes"].set(event.memory_bytes)
                metrics["data_ready_batches"].set(event.data_ready)
                metrics["data_starved_steps"].set(event.data_starved)
            case NetworkTraffic():
                for tier, count in event.sent_bytes.items():
                    self._sent.labels(tier).set(count)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
