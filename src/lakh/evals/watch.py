"""Scores the checkpoints of a run as they appear, in a process next to the training.

Each result goes to RUN/evals/<step>/<task>/ and is written as an event of the run: `scored` for a benchmark, `measured`
for bits per byte; the dashboard plots both. What has a result.json is done, so a watch that was stopped continues with
the rest. The trainer never waits for it. A checkpoint that is removed while it is read is skipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakh import events, storage
from lakh.errors import LakhError, UserError
from lakh.evals import perplexity
from lakh.evals.generation.generate import generate, load_engine
from lakh.evals.run import EvalResult, score_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.scoring.protocol import Origin
from lakh.evals.task import Task

if TYPE_CHECKING:
    from lakh.evals.generation.generate import CompletionGenerator

__all__ = ["WATCHER_RANK", "bits_per_byte", "curve", "watch"]

WATCHER_RANK = 99_999  # its own file of events: each file has one writer
FOLDER = "evals"
RESULT = "result.json"
A_RUN = "give the folder of a run: lakh train --out RUNDIR"


@dataclass(frozen=True)
class PendingEval:
    task: str
    step: int
    checkpoint: str
    out: str


def pending(run_dir: str, names: Sequence[str], *, every: int = 1) -> Iterator[PendingEval]:
    """Checkpoints without a result, the newest first, of every `every`-th step."""
    from lakh.checkpoint import list_complete

    for step, folder in reversed(list_complete(run_dir)):
        if step % every:
            continue
        for name in names:
            out = storage.join(run_dir, FOLDER, f"{step:08d}", name)
            if not storage.exists(storage.join(out, RESULT)):
                yield PendingEval(name, step, folder, out)


def watch(
    run_dir: str, tasks: Sequence[Task], sandbox: Sandbox | None, origin: Origin, *, n: int = 1, every: int = 1,
    poll_s: float = 5.0, until: Callable[[], bool] = lambda: False, texts: Sequence[tuple[str, str]] = (),
    on_result: Callable[[int, dict[str, Any]], None] | None = None,
    on_skip: Callable[[str, LakhError], None] | None = None,
    load: Callable[[str], CompletionGenerator] = load_engine,
    measure: Callable[[str, Sequence[tuple[str, str]]], dict[str, Any]] = perplexity.measure,
    workers: int | None = None,
) -> int:  # fmt: skip
    """Score checkpoints until `until()` is true and none is left. Returns the number of results.

    With `texts` (name, text) it also measures bits per byte on them; without tasks it needs no sandbox.
    """
    storage.require_folder(run_dir, A_RUN)
    made, skipped = 0, set()
    loaded: tuple[str, CompletionGenerator] | None = None  # one model for all tasks of a checkpoint

    def evaluate(item: PendingEval) -> tuple[dict[str, Any], events.Event]:
        nonlocal loaded
        if item.task == perplexity.BITS_PER_BYTE:
            found = measure(item.checkpoint, texts)
            storage.write_bytes(storage.join(item.out, RESULT), json.dumps(found, indent=1).encode())
            low, high = found["interval"]
            values = {"bits_per_byte": found["bits_per_byte"], "low": low, "high": high}
            return found, events.HookMetrics(step=item.step, hook=perplexity.BITS_PER_BYTE, values=values)
        assert sandbox is not None, "tasks run programs"
        if loaded is None or loaded[0] != item.checkpoint:
            loaded = item.checkpoint, load(item.checkpoint)
        task = by_name[item.task]
        samples = generate(loaded[1], task, origin, n=n)
        result = score_samples(task, samples, sandbox, origin, workers=workers, out=item.out)
        return result.as_dict(), _scored(item, result)

    by_name = {task.name: task for task in tasks}
    names = [*by_name, *([perplexity.BITS_PER_BYTE] if texts else [])]
    with events.EventLog(run_dir, WATCHER_RANK) as log:
        while True:
            last = until()
            item = next((item for item in pending(run_dir, names, every=every) if item.out not in skipped), None)
            if item is None:
                if last:
                    return made
                time.sleep(poll_s)
                continue
            try:
                found, event = evaluate(item)
            except LakhError as error:
                if isinstance(error, UserError) and storage.exists(item.checkpoint):
                    raise
                skipped.add(item.out)  # removed or damaged in the meantime
                if on_skip:
                    on_skip(item.checkpoint, error)
                continue
            made += 1
            log.write(event)
            if on_result:
                on_result(item.step, found)


def curve(run_dir: str, task: str | None = None) -> list[events.Scored]:
    """Scores so far, by task and step; the later one for a checkpoint that was scored twice."""
    storage.require_folder(run_dir, A_RUN)
    found = {
        (event.task, event.step or 0): event
        for event in events.read(run_dir, WATCHER_RANK)
        if isinstance(event, events.Scored) and task in (None, event.task)
    }
    return [found[key] for key in sorted(found)]


def bits_per_byte(run_dir: str) -> list[events.HookMetrics]:
    """Measurements so far, by step; the later one for a checkpoint that was measured twice."""
    read = events.read(run_dir, WATCHER_RANK)
    found = {e.step: e for e in read if isinstance(e, events.HookMetrics) and e.hook == perplexity.BITS_PER_BYTE}
    return [found[step] for step in sorted(found)]


def _scored(item: PendingEval, result: EvalResult) -> events.Scored:
    summary = result.summary
    low, high = summary.interval or (None, None)
    return events.Scored(
        step=item.step,
        task=result.protocol.task.name,
        pass_at_1=summary.pass_at_k.get(1),
        low=low,
        high=high,
        passed=summary.passed,
        total=summary.total,
        seconds=result.seconds,
        path=item.out,
    )
