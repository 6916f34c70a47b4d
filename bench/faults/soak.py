"""lakh bench soak: a training job with a random fault every 20 s ends with the loss of an undisturbed one.

The job has two replicas over c3 and TCP, restarts, copies in memory, and checkpoints on a real S3 server (moto) behind
a proxy that can fail. The order of the faults is drawn from a seed. After the time with faults the job ends, and an
undisturbed run does the same number of steps on the same ranks. The result is computed from the events of both runs,
so an interrupted soak has one too: of the faults until then.
"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bench.faults.job import as_options, s3_server, settings
from bench.harness import BenchRow, out_option, result
from bench.harness.results import log
from lakh import events
from lakh.cli.output import CommandResult, print_result
from lakh.errors import LakhError
from lakh.events import Event, StepDone
from lakh.goodput import GoodputAccount
from lakh.health.faults.job import STORE_FAULTS, TrainingJob, object_store_of, run_lakh

__all__ = ["SoakRecord", "soak"]

FAULTS = ("kill", "kill-ranks", "kill-all", "stop", "link-cut", "disk-full", "corrupt-chunk")
OVER_TCP = {"LAKH_C3_HOST": "host-{pid}"}  # shared memory has no link that could be cut
SHARED_MEMORY = "/dev/shm"
MOST_STEPS = 10_000_000  # more than any soak does
LAST_STEPS = 10  # after the last fault
LR = 3e-4
LOSS_LIMIT = 1e-4
GOODPUT_LIMIT = 1e-3
COLUMNS = ("fault", "times", "next_step_s", "worst_s")
FAILED = 65
INTERRUPTED = 130  # the exit code of a command that SIGINT ended


@dataclass
class SoakRecord:
    """What a soak has done so far."""

    names: tuple[str, ...]
    steps: int = 0
    recovered: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from each fault to the next step, by name."""
    refused: Counter[str] = field(default_factory=Counter)
    calm: dict[str, Any] = field(default_factory=dict)
    """What the undisturbed run reports; empty until it has ended."""
    faulty: dict[str, Any] = field(default_factory=dict)
    calm_losses: dict[int, float] = field(default_factory=dict)
    faulty_events: list[Event] = field(default_factory=list)
    failed: str = ""

    @property
    def faults(self) -> int:
        return sum(map(len, self.recovered.values()))

    @property
    def has_ended(self) -> bool:
        return bool(self.calm) and bool(self.faulty)

    def facts(self) -> dict[str, Any]:
        losses = losses_by_step(self.faulty_events)
        both = sorted(losses.keys() & self.calm_losses.keys())
        gaps = [abs(losses[step] - self.calm_losses[step]) for step in both]
        apart = [step for step, gap in zip(both, gaps, strict=True) if gap > LOSS_LIMIT]
        shares = shares_of_time(self.faulty_events)
        last_gap = gaps[-1] if gaps else None
        is_same = self.faulty["stream_sha256"] == self.calm["stream_sha256"] if self.has_ended else None
        return {
            "ended": self.has_ended,
            "failed": self.failed,
            "steps": self.steps,
            "steps_done": len(losses),
            "faults": self.faults,
            "loss_gap": abs(self.faulty["loss"] - self.calm["loss"]) if self.has_ended else last_gap,
            "worst_loss_gap": max(gaps, default=None),
            "first_step_apart": min(apart, default=None),
            "same_stream": is_same,
            "goodput": shares.get("productive"),
            "goodput_sum": sum(shares.values()) if shares else None,
            "shares": shares,
            "missing": [name for name in self.names if not self.recovered.get(name)],
            "not_injected": dict(self.refused),
        }

    def rows(self) -> list[BenchRow]:
        """One row for each fault, and one for the whole run."""
        found: list[BenchRow] = [
            {"fault": name, "times": len(taken), "next_step_s": statistics.median(taken), "worst_s": max(taken)}
            for name, taken in self.recovered.items()
            if taken
        ]
        facts = self.facts()
        shares = {f"{name} %": round(100 * share, 2) for name, share in facts.pop("shares").items() if share}
        return [*found, {"fault": "all", "times": facts.pop("faults"), **facts, **shares}]


@click.command("soak")
@click.option("--minutes", type=click.FloatRange(min=0.5), default=30.0, show_default=True, help="Time with faults.")
@click.option("--every", "every_s", type=click.FloatRange(min=5.0), default=20.0, show_default=True, help="Seconds.")
@click.option("--storage", type=click.Choice(["s3", "disk"]), default="s3", show_default=True, help="Of checkpoints.")
@click.option("--backend", type=click.Choice(["c3", "gloo"]), default="c3", show_default=True, help="Collectives.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the faults.")
@out_option
@print_result
def soak(minutes: float, every_s: float, storage: str, backend: str, seed: int, out: str | None) -> CommandResult:
    """Train with a random fault every 20 s, and compare the final loss with an undisturbed run.

    The undisturbed run comes second and does as many steps as the first one. Fails unless every fault was injected,
    the losses are equal to 1e-4, both runs have read the same sequences, and the classes of goodput sum to 100 %.
    SIGINT or SIGTERM ends it early; the result then covers the faults until then. With --out the result file is also
    written after each fault.
    """
    names = (*FAULTS, *(STORE_FAULTS if storage == "s3" else ()))
    record = SoakRecord(names, recovered={name: [] for name in names})

    def report() -> CommandResult:
        facts = record.facts()
        return result("soak", record.rows(), out, columns=COLUMNS, title=_title(facts), **facts)

    with tempfile.TemporaryDirectory(prefix="lakh-soak-") as folder, s3_server(Path(folder)):
        code = FAILED
        try:
            with _terminate_as_interrupt():
                write = report if out else None
                run_soak(record, Path(folder), minutes, every_s, storage, backend, seed, on_fault=write)
            facts = record.facts()
            is_equal = facts["loss_gap"] <= LOSS_LIMIT and facts["same_stream"]
            is_billed_once = abs(facts["goodput_sum"] - 1) < GOODPUT_LIMIT
            code = 0 if is_equal and is_billed_once and not facts["missing"] else FAILED
        except KeyboardInterrupt:
            code = INTERRUPTED
        except LakhError as error:
            record.failed = str(error)
            log(f"the job failed: {error}")
        checked = report()
    return CommandResult(checked.data, checked.text, exit_code=code)


def run_soak(
    record: SoakRecord,
    folder: Path,
    minutes: float,
    every_s: float,
    storage: str,
    backend: str,
    seed: int,
    *,
    on_fault: Callable[[], object] | None = None,
) -> None:
    """Run both jobs and fill in `record`, also if interrupted; `on_fault()` is called after each fault."""
    options = ["checkpoint.every=20", "checkpoint.memory_every=5", "checkpoint.keep=3", f"train.backend={backend}"]
    options += ["mesh.dp_replicate=2", "train.peer_timeout_s=30", "optim.schedule=constant", f"optim.lr={LR}"]
    # A survivor adds the gradients of both replicas in another order, and 1,000 steps turn 1e-7 into 4e-3 of loss.
    options += ["train.reduce_dtype=float64"]

    def train(steps: int, name: str) -> list[str]:
        url = [f"checkpoint.url=s3://bucket/{name}"] if storage == "s3" else []
        return ["train", "laptop", *as_options(settings(steps, *options, *url))]

    run_dir, arguments = folder / "faulty", train(MOST_STEPS, "faulty")
    url = "s3://bucket" if storage == "s3" else ""
    with (
        tempfile.TemporaryDirectory(prefix="lakh-soak-", dir=SHARED_MEMORY) as memory,
        object_store_of(url) as store,
        TrainingJob(arguments, run_dir, nproc=2, store=store, memory_dir=Path(memory), environment=OVER_TCP) as job,
    ):
        try:
            job.wait_for_step(1)
            _inject_faults(record, job, random.Random(seed), minutes, every_s, on_fault)
            log("no more faults; ending the job")
            job.stop()
            record.steps = job.steps()[-1].step + LAST_STEPS
            job.resume(as_options([f"train.steps={record.steps}"]))
            record.faulty = job.result()
        finally:
            record.faulty_events = events.read(run_dir, rank=0)
    log(f"undisturbed: {record.steps} steps")
    record.calm = run_lakh([*train(record.steps, "calm"), "--nproc", "2", "--out", str(folder / "calm")])
    record.calm_losses = losses_by_step(events.read(folder / "calm", rank=0))


def _inject_faults(
    record: SoakRecord,
    job: TrainingJob,
    dice: random.Random,
    minutes: float,
    every_s: float,
    on_fault: Callable[[], object] | None,
) -> None:
    """Every fault once, in random order, then all of them again, and so on."""
    end_s = time.monotonic() + 60 * minutes
    waiting: list[str] = []
    while time.monotonic() < end_s and not job.has_ended:
        began_s = time.monotonic()
        waiting = waiting or dice.sample(record.names, len(record.names))
        _inject_one(record, job, waiting.pop(), dice)
        record.faulty_events = events.read(job.run_dir, rank=0)
        if on_fault:
            on_fault()
        while time.monotonic() < min(began_s + every_s, end_s) and not job.has_ended:
            time.sleep(0.2)


def _inject_one(record: SoakRecord, job: TrainingJob, name: str, dice: random.Random) -> None:
    try:
        injected_s = job.inject(name, dice)
        recovered_s = job.wait_for_step(0, after_s=injected_s) - injected_s
    except LakhError as error:
        record.refused[f"{name}: {error.found}"] += 1
        log(f"{name}: not injected: {error.found}")
        return
    record.recovered[name].append(recovered_s)
    step = job.steps()[-1].step
    log(f"fault {record.faults}: {name}; next step after {recovered_s:.1f} s; step {step}")


def losses_by_step(found: list[Event]) -> dict[int, float]:
    """The loss of each step; of a step that was repeated, the last one."""
    return {event.step: event.loss for event in found if isinstance(event, StepDone)}


def shares_of_time(found: list[Event]) -> dict[str, float]:
    """The share of each class of goodput in the time from the first event to the last one, without the time in which
    the run was stopped. They sum to 1 unless a second is billed twice."""
    account = GoodputAccount()
    for event in found:
        account.add(event.as_dict())
    stopped_s = sum(end_s - begin_s for begin_s, end_s in account.spans["stopped"])
    wall_s = (account.last_s or 0.0) - (account.first_s or 0.0) - stopped_s
    return {name: seconds / wall_s for name, seconds in account.seconds().items()} if wall_s > 0 else {}


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _title(facts: dict[str, Any]) -> str:
    streams = {True: "the same sequences", False: "OTHER SEQUENCES", None: "not ended"}
    words = [f"{facts['faults']} faults", streams[facts["same_stream"]]]
    if facts["loss_gap"] is not None:
        words.append(f"loss gap {facts['loss_gap']:.1e}")
    if facts["goodput"] is not None:
        words.append(f"goodput {facts['goodput']:.0%} of {facts['goodput_sum']:.0%}")
    return ", ".join(words)
