"""What lakh eval shows: bars while it works, tables of results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lakh.cli.output import CommandResult, console, table
from lakh.evals.generate import Generator, generate
from lakh.evals.journal import Journal
from lakh.evals.protocol import Origin
from lakh.evals.run import Result
from lakh.evals.samples import Sample
from lakh.evals.task import Task

__all__ = ["Bar", "bar", "generated", "show"]


@contextlib.contextmanager
def generated(engine: Generator, task: Task, origin: Origin, n: int, folder: str | None) -> Iterator[list[Sample]]:
    """n samples of every problem, with a bar; kept in a journal in `folder` until the block ends well."""
    key = {"task": task.name, "data": task.data_sha256, "problems": len(task.problems), **asdict(origin)}
    journal = Journal(f"{folder}/generated.journal.jsonl" if folder else None, key)
    with contextlib.closing(journal):
        with bar(f"{task.name}: generating", n * len(task.problems)) as progress:
            samples = generate(engine, task, origin, n=n, progress=progress, journal=journal)
        yield samples
        journal.finish()


class Bar:
    """Hears how much is done, and shows it where somebody looks."""

    def __init__(self, tell: Callable[[str, int, int], None], title: str, total: int) -> None:
        self._tell, self._title, self._total = tell, title, total

    def __call__(self, done: int) -> None:
        self._tell(self._title, done, self._total)

    def before(self, title: str, total: int) -> Bar:
        """The same bar under another title, for work that comes first."""
        return Bar(self._tell, title, total)


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Bar]:
    if not sys.stderr.isatty():
        yield Bar(lambda *_: None, title, total)  # nobody looks, so nothing is drawn, nor is what draws it imported
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield Bar(
            lambda title, done, total: progress.update(task, description=title, completed=done, total=total),
            title,
            total,
        )


class Shown:
    """Results as people see them: made when they are printed, which --json never does."""

    def __init__(self, results: list[dict[str, Any]], failures_of: Result | None) -> None:
        self._results, self._failures_of = results, failures_of

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        blocks: list[Any] = []
        for data in self._results:
            if "bits_per_byte" in data:
                keys = ("bits_per_byte", "perplexity_per_token", "tokens", "bytes", "documents", "seconds")
                rows = [(key, data[key]) for key in keys]
            else:
                rows = _score_rows(data)
            blocks += [
                table(["", "value"], rows, title=data["task"]),
                Text(data["protocol"], no_wrap=True, overflow="ignore"),
            ]
        if self._failures_of is not None:
            pairs = zip(self._failures_of.samples, self._failures_of.verdicts, strict=True)
            failed = [(sample.task_id, v.kind, v.detail[:90]) for sample, v in pairs if not v.passed][:20]
            if failed:
                title = "did not pass (at most 20 are shown)"
                blocks.append(table(["problem", "ended as", "why"], failed, title=title))
        return Group(*blocks)


def show(results: list[dict[str, Any]], failures_of: Result | None = None) -> CommandResult:
    """One table per result, its protocol line below; for people also the first problems that did not pass."""
    for data in results:
        if data.get("sandbox_errors"):
            errors = f"warning: {data['sandbox_errors']} of {data['total']} programs did not run (sandbox_error)"
            console().print(f"{errors}: the score is too low", style="yellow")
    return CommandResult(results[0] if len(results) == 1 else {"results": results}, Shown(results, failures_of))


def _score_rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("passed", f"{data['passed']} of {data['total']}")]
    for k, value in data["pass_at_k"].items():
        rows.append((f"pass@{k}", f"{value:.4f}"))
        if k in data.get("intervals", {}):  # results of earlier versions have none
            rows.append((f"pass@{k}, 95 % interval", "{:.4f} - {:.4f}".format(*data["intervals"][k])))
    rows += [(kind, count) for kind, count in data["kinds"].items() if kind != "passed" and count]
    return [*rows, ("seconds", f"{data['seconds']:.1f}")]
