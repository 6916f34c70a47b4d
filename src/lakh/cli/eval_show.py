"""Output of lakh eval: progress bars and tables of results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lakh.cli.output import CommandResult, console, table
from lakh.evals.run import EvalResult

__all__ = ["bar", "show"]

StageOfBar = Callable[[str, int], Callable[[int], None]]


@contextlib.contextmanager
def bar(title: str) -> Iterator[StageOfBar]:
    """A progress bar. Yields a function of a stage's name and total, which returns a function of the number done."""
    if not sys.stderr.isatty():
        yield lambda name, total: lambda done: None  # and rich.progress is not imported
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield (
            lambda name, total: (
                lambda done: progress.update(task, description=f"{title}: {name}", completed=done, total=total)
            )
        )


def show(results: list[dict[str, Any]], failures_of: EvalResult | None = None) -> CommandResult:
    """One table per result with its protocol line; also the first problems that did not pass."""
    for data in results:
        if data.get("sandbox_errors"):
            errors = f"warning: {data['sandbox_errors']} of {data['total']} programs did not run (sandbox_error)"
            console().print(f"{errors}: the score is too low", style="yellow")
    data = results[0] if len(results) == 1 else {"results": results}
    return CommandResult(data, lambda: _tables(results, failures_of))


def _tables(results: list[dict[str, Any]], failures_of: EvalResult | None) -> Any:
    from rich.console import Group
    from rich.text import Text

    blocks: list[Any] = []
    for data in results:
        if "bits_per_byte" in data:
            keys = ("bits_per_byte", "perplexity_per_token", "tokens", "bytes", "documents", "seconds")
            rows = [(key, data[key]) for key in keys]
        else:
            rows = _score_rows(data)
        blocks.append(table(["", "value"], rows, title=data["task"]))
        blocks.append(Text(data["protocol"], no_wrap=True, overflow="ignore"))
    if failures_of is not None:
        pairs = zip(failures_of.samples, failures_of.verdicts, strict=True)
        failed = [(sample.task_id, v.kind, v.detail[:90]) for sample, v in pairs if not v.passed][:20]
        if failed:
            title = "did not pass (at most 20 are shown)"
            blocks.append(table(["problem", "verdict", "reason"], failed, title=title))
    return Group(*blocks)


def _score_rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("passed", f"{data['passed']} of {data['total']}")]
    for k, value in data["pass_at_k"].items():
        rows.append((f"pass@{k}", f"{value:.4f}"))
        if k in data.get("intervals", {}):  # results of earlier versions have none
            rows.append((f"pass@{k}, 95 % interval", "{:.4f} - {:.4f}".format(*data["intervals"][k])))
    rows += [(kind, count) for kind, count in data["kinds"].items() if kind != "passed" and count]
    return [*rows, ("seconds", f"{data['seconds']:.1f}")]
