"""Output of commands: a table or text for people, one JSON document for programs.

A command returns a `CommandResult`; `@print_result` adds `--json` and prints one of the two forms. Progress and
messages go to `console()`, which writes to stderr.
"""

from __future__ import annotations

import functools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from lakh.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = ["CommandResult", "console", "print_result", "set_option", "table"]

set_option = click.option(
    "--set", "sets", multiple=True, metavar="PATH=VALUE", help="Override one setting. Repeatable."
)


SHORT_CELL_CHARS = 8  # columns of short cells and of numbers never wrap; in a narrow window the others do
HEADING_CHARS = 10  # a field name (tok_per_s) above narrower cells is wrapped at about this width


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: `data` for --json, `text` for people.

    `text` may be a rich renderable, or a function that makes one, which --json does not call.
    """

    data: dict[str, Any]
    text: Any = None
    exit_code: int = 0


def print_result(function: Callable[..., CommandResult]) -> Callable[..., int]:
    """Add --json to a command that returns a CommandResult, and print the result."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document as the last line of stdout.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> int:
        _reject_non_finite(kwargs)
        result = function(*args, **kwargs)
        if as_json:
            finite = json.loads(json.dumps(result.data), parse_constant=lambda _: None)  # JSON has no NaN or infinity
            click.echo(json.dumps(finite))
            return result.exit_code
        text = result.text() if callable(result.text) else result.text
        if isinstance(text, str):
            click.echo(text)
        elif text is not None:
            from rich.console import Console

            screen = Console()
            with screen.capture() as shown:  # rich itself would exit with 1 on a closed pipe
                screen.print(text, crop=False)  # no_wrap lines may be longer than the window
            click.echo(shown.get(), nl=False)
        return result.exit_code

    return wrapper


def _reject_non_finite(values: dict[str, Any]) -> None:
    """click accepts "nan" and "inf" as numbers; no command can use them."""
    for option in click.get_current_context().command.params:
        value = values.get(option.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{option.opts[0]} {value}", "is not a finite number", "give a finite number")


def console() -> Console:
    """The console for progress and messages: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Any:
    """A plain table; numbers are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    narrowest = 1
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        longest = max((len(_cell(row[index])) for row in rows), default=0)
        no_wrap = numeric or longest <= SHORT_CELL_CHARS
        heading = _heading(column, longest)
        least = max(longest if no_wrap else SHORT_CELL_CHARS, *map(len, heading))
        narrowest += least + 3  # with its padding
        result.add_column(
            Text("\n".join(heading)),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=no_wrap,
            min_width=least,  # rich would cut digits to fit a narrow window
        )
    for row in rows:
        result.add_row(*[Text(_cell(value)) for value in row])  # Text: "[train]" is not markup
    return _MinWidthTable(narrowest, result)


@dataclass(frozen=True)
class _MinWidthTable:
    """A table that overflows a narrow window; rich alone would shrink a wrapping column to nothing."""

    min_chars: int
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.table, options.update(width=max(self.min_chars, options.max_width)))


def _heading(column: str, cells_chars: int) -> list[str]:
    """The lines of a heading: a field name is wrapped at underscores, other headings are kept."""
    if "_" not in column:
        return [column]
    return textwrap.wrap(column.replace("_", " "), max(cells_chars, HEADING_CHARS), break_long_words=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:,.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_inner(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_inner, value))
    return "" if value is None else str(value)


def _inner(value: Any) -> str:
    """A nested value, in parentheses if it has parts itself."""
    return f"({_cell(value)})" if isinstance(value, dict | list | tuple) else _cell(value)
