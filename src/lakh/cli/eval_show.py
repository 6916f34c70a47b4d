"""Output of lakh eval: progress bars and tables of results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lakh.cli.format import seconds_text
from lakh.cli.output import CommandResult, console, fact_rows, print_warning, table
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


def show(
    results: list[dict[str, Any]], failures_of: EvalResult | None = None, next_commands: Sequence[str] = ()
) -> CommandResult:
    """A few rows per result; with -v also its protocol line and the first problems that did not pass."""
    for data in results:
        if data.get("sandbox_errors"):
            errors = f"{data['sandbox_errors']} of {data['total']} programs did not run (sandbox_error)"
            print_warning(f"{errors}: the score is too low")
    data = results[0] if len(results) == 1 else {"results": results}
    return CommandResult(
        data,
        lambda: _result_rows(results),
        details=lambda: _details(results, failures_of),
        next_commands=next_commands,
    )


def _result_rows(results: list[dict[str, Any]]) -> Any:
    from rich.console import Group

    return Group(*[fact_rows(_rows(data), title=data["task"]) for data in results])


def _rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    if "bits_per_byte" in data:
        size = f"{data['documents']:,} documents, {data['bytes']:,} bytes"
        return [
            ("bits per byte", f"{data['bits_per_byte']:.4f}"),
            ("perplexity", f"{data['perplexity_per_token']:.4g} per token"),
            ("measured on", size),
            ("took", seconds_text(data["seconds"])),
        ]
    rows: list[tuple[str, Any]] = [("passed", f"{data['passed']:,} of {data['total']:,}")]
    for k, value in data["pass_at_k"].items():
        interval = data.get("intervals", {}).get(k)  # results of earlier versions have none
        between = "  (95 % interval: {:.1%} to {:.1%})".format(*interval) if interval else ""
        rows.append((f"pass@{k}", f"{value:.1%}{between}"))
    others = {kind: count for kind, count in data["kinds"].items() if kind != "passed" and count}
    rows.append(("not passed", ", ".join(f"{count:,} {kind}" for kind, count in others.items()) or None))
    rows.append(("sandbox", data.get("sandbox")))
    return [*rows, ("took", seconds_text(data["seconds"]))]


def _details(results: list[dict[str, Any]], failures_of: EvalResult | None) -> Any:
    from rich.console import Group
    from rich.text import Text

    blocks: list[Any] = [Text(data["protocol"], no_wrap=True, overflow="ignore") for data in results]
    if failures_of is not None:
        pairs = zip(failures_of.samples, failures_of.verdicts, strict=True)
        failed = [(sample.task_id, v.kind, v.detail[:90]) for sample, v in pairs if not v.passed][:20]
        if failed:
            title = "did not pass (at most 20 are shown)"
            blocks.append(table(["problem", "verdict", "reason"], failed, title=title))
    return Group(*blocks)
