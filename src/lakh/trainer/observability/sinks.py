"""Sinks: show the events of a run in TensorBoard and Prometheus (train.sinks).

A sink reads RUN/events in a thread of rank 0, so that it works under every launcher. A sink that fails prints a warning
and stops; the run continues.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lakh import events, storage
from lakh.errors import LakhError, MissingExtra
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
from lakh.metrics import MetricsRegistry
from lakh.spec import Training

__all__ = ["PrometheusSink", "Sink", "TensorBoardSink", "export_events"]

POLL_S = 0.5
STOP_TIMEOUT_S = 10.0
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
    match event:
        case StepDone():
            named = {
                "train/loss": event.loss,
                "train/lr": event.lr,
                "train/grad_norm": event.grad_norm,
                "speed/tokens_per_s": event.tokens_per_s,
                "speed/step_s": event.step_s,
                "data/wait_s": event.data_wait_s,
            }
            return named | ({"speed/mfu": event.mfu} if event.mfu is not None else {})
        case Evaluated():
            return {"heldout/loss": event.loss}
        case CheckpointSaved():
            return {"checkpoint/seconds": event.seconds, "checkpoint/bytes": float(event.bytes)}
        case Resources():
            return {
                "memory/bytes": float(event.memory_bytes),
                "data/ready": float(event.data_ready),
                "data/starved": float(event.data_starved),
            }
        case NetworkTraffic():
            return {f"traffic/{tier}_bytes": float(count) for tier, count in event.sent_bytes.items()}
        case HookMetrics():
            return {f"hooks/{key}": float(value) for key, value in event.values.items()}
    return {}


class PrometheusSink:
    """http://HOST:PORT/metrics; RUN/prometheus.json holds the port."""

    def __init__(self, port: int, run_dir: str | Path) -> None:
        metrics = MetricsRegistry("lakh_")
        self._step_seconds = metrics.histogram("step_seconds", "time of one step", STEP_SECONDS_BUCKETS)
        self._gauges = {
            name: metrics.gauge(name, text)
            for name, text in (
                ("step", "optimizer updates so far"),
                ("loss", "training loss in nats per token"),
                ("heldout_loss", "held-out loss in nats per token"),
                ("grad_norm", "gradient norm before clipping"),
                ("learning_rate", "learning rate"),
                ("mfu_ratio", "causal-exact model FLOPs over the dense peak"),
                ("tokens_per_second", "tokens per second over all ranks"),
                ("memory_bytes", "peak memory of rank 0"),
                ("data_ready_batches", "prefetched batches"),
                ("data_starved_steps", "steps whose batch was not ready in time"),
            )
        }
        self._counters = {
            name: metrics.counter(f"{name}_total", text)
            for name, text in (
                ("tokens", "tokens trained on"),
                ("data_wait_seconds", "time spent waiting for data"),
                ("steps_skipped", "skipped updates"),
                ("restarts", "restarts of all ranks by the launcher"),
                ("checkpoint_seconds", "time that training paused for checkpoints"),
            )
        }
        self._sent = metrics.gauge("step_sent_bytes", "bytes that rank 0 sends in one step", ["tier"])
        self._server = metrics.serve(port, "0.0.0.0", setting="train.prometheus_port")
        document = json.dumps({"port": self._server.port}).encode()
        storage.write_bytes(storage.join(run_dir, "prometheus.json"), document)
        self._tokens = 0

    def export(self, event: Event) -> None:
        gauges, counters = self._gauges, self._counters
        match event:
            case StepDone():
                self._step_seconds.observe(event.step_s)
                gauges["step"].set(event.step)
                gauges["loss"].set(event.loss)
                gauges["grad_norm"].set(event.grad_norm)
                gauges["learning_rate"].set(event.lr)
                gauges["tokens_per_second"].set(event.tokens_per_s)
                counters["data_wait_seconds"].inc(event.data_wait_s)
                counters["tokens"].inc(max(0, event.tokens - self._tokens) if self._tokens else 0)
                self._tokens = event.tokens
                if event.mfu is not None:
                    gauges["mfu_ratio"].set(event.mfu)
            case Evaluated():
                gauges["heldout_loss"].set(event.loss)
            case StepSkipped():
                counters["steps_skipped"].inc()
            case Restarted():
                counters["restarts"].inc()
            case CheckpointSaved():
                counters["checkpoint_seconds"].inc(event.seconds)
            case Resources():
                gauges["memory_bytes"].set(event.memory_bytes)
                gauges["data_ready_batches"].set(event.data_ready)
                gauges["data_starved_steps"].set(event.data_starved)
            case NetworkTraffic():
                for tier, count in event.sent_bytes.items():
                    self._sent.labels(tier).set(count)

    def close(self) -> None:
        self._server.close()
