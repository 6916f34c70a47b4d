"""Output of lakh eval: progress bars and tables of results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lakh.cli.output import CommandResult, console, table
from lakh.evals.run import EvalResult

__all__ = ["EvalProgressBar", "bar", "show"]


class EvalProgressBar:
    """Called with the number done so far."""

    def __init__(self, update: Callable[[str, int, int], None], title: str, total: int) -> None:
        self._update, self._title, self._total = update, title, total

    def __call__(self, done: int) -> None:
        self._update(self._title, done, self._total)

    def before(self, title: str, total: int) -> EvalProgressBar:
        """The same bar with another title, for work that comes first."""
        return EvalProgressBar(self._update, title, total)


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[EvalProgressBar]:
    if not sys.stderr.isatty():
        yield EvalProgressBar(lambda *_: None, title, total)  # and rich.progress is not imported
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield EvalProgressBar(
            lambda title, done, total: progress.update(task, description=title, completed=done, total=total),
            title,
            total,
        )


class ResultsView:
    """Results as tables, made only when they are printed, which --json never does."""

    def __init__(self, results: list[dict[str, Any]], failures_of: EvalResult | None) -> None:
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
                blocks.append(table(["problem", "verdict", "reason"], failed, title=title))
        return Group(*blocks)


def show(results: list[dict[str, Any]], failures_of: EvalResult | None = None) -> CommandResult:
    """One table per result with its protocol line; also the first problems that did not pass."""
    for data in results:
        if data.get("sandbox_errors"):
            errors = f"warning: {data['sandbox_errors']} of {data['total']} programs did not run (sandbox_error)"
            console().print(f"{errors}: the score is too low", style="yellow")
    return CommandResult(results[0] if len(results) == 1 else {"results": results}, ResultsView(results, failures_of))


def _score_rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("passed", f"{data['passed']} of {data['total']}")]
    for k, value in data["pass_at_k"].items():
        rows.append((f"pass@{k}", f"{value:.4f}"))
        if k in data.get("intervals", {}):  # results of earlier versions have none
            rows.append((f"pass@{k}, 95 % interval", "{:.4f} - {:.4f}".format(*data["intervals"][k])))
    rows += [(kind, count) for kind, count in data["kinds"].items() if kind != "passed" and count]
    return [*rows, ("seconds", f"{data['seconds']:.1f}")]
