"""Progress bars on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lakh import events
from lakh.cli.output import console as stderr

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["progress_bar", "show_training"]


def show_training(console: Console, run_dir: str, steps: int, ended: Callable[[], bool]) -> None:
    """A bar with loss, tokens/s and time left, from the run's events; returns when `ended` and all events are shown."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    step, heldout, began_s = "", "", time.time()
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task("starting", total=steps)
        for event in events.follow(run_dir, rank=0, since_s=began_s, until=ended):
            match event:
                case events.StepDone():
                    step = f"loss {event.loss:.3f}  {event.tokens_per_s:,.0f} tokens/s"
                    bar.update(task, completed=event.step, description=f"{step}{heldout}")
                case events.Evaluated():
                    heldout = f"  held-out loss {event.loss:.3f}"
                    bar.update(task, description=f"{step}{heldout}".strip())
                    console.print(f"step {event.step}: held-out loss {event.loss:.4f} on {event.sequences} sequences")
                case events.CheckpointSkipped():
                    text = f"warning: skipped the damaged checkpoint {event.path}: {event.reason}"
                    console.print(text, style="yellow")
                case events.CheckpointFailed():
                    since = f"only {event.last} is left" if event.last else "there is no checkpoint"
                    text = f"warning: step {event.step} is not saved, {since}: {event.path}: {event.reason}"
                    console.print(text, style="yellow")
                case events.StorageDelayed():
                    text = (
                        f"warning: {event.operation}: attempt {event.attempts}, {event.seconds:.1f} s: {event.reason}"
                    )
                    console.print(text, style="yellow")
                case events.Restarted():
                    console.print(f"restarted (attempt {event.attempt}) because {event.reason}")
                case events.RanksLost():
                    left = f"{event.left} rank(s) continue without a restart after {event.seconds:.1f} s"
                    console.print(f"step {event.step}: {left}: {event.reason}")
                case events.RanksJoined():
                    console.print(
                        f"step {event.step}: {len(event.joined)} rank(s) joined, {event.ranks} ranks continue"
                    )
                case events.StepSkipped():
                    console.print(f"step {event.step} skipped: {event.reason}")
                case events.Rewound():
                    console.print(f"step {event.step}: back to step {event.to_step}: {event.reason}")
                case events.RunStarted() if event.step:
                    console.print(f"continuing at step {event.step}, sequence {event.sequence_index:,}")


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, fed by a progress callback; silent if stderr is not a terminal."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    parts = (TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    screen = stderr()
    with Progress(*parts, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield advance
