"""Checkpoints of a run, evaluated as they appear: beside the training, in another process, on CPUs that are free.

Each result is kept under RUN/evals/<step>/<task>/ and told as an event of the run: `scored` for a benchmark, `measured`
for bits per byte. `curve` gives the scores in the order of steps, and the dashboard draws both. What has a
result.json is done: a watch that was stopped goes on with the rest. The trainer is never waited for and never slowed
but by the use of the machine; a checkpoint that is removed while it is read is passed over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lakh import events, storage
from lakh.errors import LakhError, UserError
from lakh.evals import perplexity
from lakh.evals.generate import Generator, generate, load_engine
from lakh.evals.protocol import Origin
from lakh.evals.run import Result, score
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Task

__all__ = ["WATCHER_RANK", "Pending", "bits_per_byte", "curve", "pending", "watch"]

WATCHER_RANK = 99_999  # its own file of events: those of the ranks have one writer each
FOLDER = "evals"
RESULT = "result.json"
A_RUN = "give the folder of a run: lakh train --out RUNDIR"


@dataclass(frozen=True)
class Pending:
    step: int
    checkpoint: str
    out: str


def pending(run_dir: str, names: Sequence[str], *, every: int = 1) -> list[tuple[str, Pending]]:
    """What is not scored yet: the newest checkpoint first, and of all only every `every`-th step."""
    from lakh.checkpoint import list_complete

    found = []
    for step, folder in reversed(list_complete(run_dir)):
        if step % every:
            continue
        for name in names:
            out = storage.join(run_dir, FOLDER, f"{step:08d}", name)
            if not storage.exists(storage.join(out, RESULT)):
                found.append((name, Pending(step, folder, out)))
    return found


def watch(
    run_dir: str,
    tasks: Sequence[Task],
    sandbox: Sandbox | None,
    origin: Origin,
    *,
    n: int = 1,
    every: int = 1,
    poll_s: float = 5.0,
    until: Callable[[], bool] = lambda: False,
    texts: Sequence[tuple[str, str]] = (),
    told: Callable[[int, dict[str, Any]], None] | None = None,
    passed_over: Callable[[str, LakhError], None] | None = None,
    load: Callable[[str], Generator] = load_engine,
    measure: Callable[[str, Sequence[tuple[str, str]]], perplexity.BitsPerByte] = perplexity.measure,
    workers: int | None = None,
) -> int:
    """Score checkpoints until `until()` holds and none is left. Returns how many results were made.

    Where `texts` (name, text) are given, bits per byte are measured on them too; without tasks no sandbox is needed.
    """
    storage.require_folder(run_dir, A_RUN)
    made, refused = 0, set()
    loaded: tuple[str, Generator] | None = None  # tasks of one checkpoint follow each other

    def judge(name: str, item: Pending) -> tuple[dict[str, Any], events.Event]:
        nonlocal loaded
        if name == perplexity.NAME:
            found = measure(item.checkpoint, texts).as_dict()
            storage.write_bytes(storage.join(item.out, RESULT), json.dumps(found, indent=1).encode())
            return found, _measured(item, found)
        assert sandbox is not None, "tasks run programs"
        if loaded is None or loaded[0] != item.checkpoint:
            loaded = item.checkpoint, load(item.checkpoint)
        samples = generate(loaded[1], by_name[name], origin, n=n)
        result = score(by_name[name], samples, sandbox, origin, workers=workers, out=item.out)
        return result.as_dict(), _scored(item, result)

    by_name = {task.name: task for task in tasks}
    names = [*by_name, *([perplexity.NAME] if texts else [])]
    with events.Log(run_dir, WATCHER_RANK) as log:
        while True:
            last = until()
            waiting = [(name, item) for name, item in pending(run_dir, names, every=every) if item.out not in refused]
            if not waiting:
                if last:
                    return made
                time.sleep(poll_s)
                continue
            name, item = waiting[0]
            try:
                found, event = judge(name, item)
            except LakhError as error:
                if isinstance(error, UserError) and storage.exists(item.checkpoint):
                    raise
                refused.add(item.out)  # removed or damaged meanwhile: the next one is there
                if passed_over:
                    passed_over(item.checkpoint, error)
                continue
            made += 1
            log.write(event)
            if told:
                told(item.step, found)


def curve(run_dir: str, task: str | None = None) -> list[events.Scored]:
    """What was scored so far, by task and step; of a checkpoint that was scored twice, the later result."""
    storage.require_folder(run_dir, A_RUN)
    found = {
        (event.task, event.step or 0): event
        for event in events.read(run_dir, WATCHER_RANK)
        if isinstance(event, events.Scored) and task in (None, event.task)
    }
    return [found[key] for key in sorted(found)]


def bits_per_byte(run_dir: str) -> list[events.Measured]:
    """What was measured so far, by step; of a checkpoint that was measured twice, the later."""
    told = events.read(run_dir, WATCHER_RANK)
    found = {e.step: e for e in told if isinstance(e, events.Measured) and e.hook == perplexity.NAME}
    return [found[step] for step in sorted(found)]


def _measured(item: Pending, found: dict[str, Any]) -> events.Measured:
    low, high = found["interval"]
    values = {"bits_per_byte": found["bits_per_byte"], "low": low, "high": high}
    return events.Measured(step=item.step, hook=perplexity.NAME, values=values)


def _scored(item: Pending, result: Result) -> events.Scored:
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
