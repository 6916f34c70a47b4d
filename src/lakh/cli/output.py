"""Output of commands: a few readable rows for people, one JSON document for programs.

A command returns a `CommandResult`; `@print_result` adds `--json` and prints one of the two forms. `@verbose_option`
above it adds `-v`, which also prints the details. Progress, messages and the commands to run next go to `console()`,
which writes to stderr.
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

from lakh.cli.complete import complete_settings
from lakh.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "CommandResult",
    "console",
    "fact_rows",
    "print_error",
    "print_result",
    "print_warning",
    "set_option",
    "styled",
    "table",
    "verbose_option",
]

set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="PATH=VALUE",
    shell_complete=complete_settings,
    help="Override one setting. Repeatable.",
)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Also print the details.")

STYLES = {"good": "green", "bad": "bold red", "missing": "yellow", "warning": "yellow"}
SHORT_CELL_CHARS = 8  # columns of short cells and of numbers never wrap; in a narrow window the others do
HEADING_CHARS = 10  # a field name (tok_per_s) above narrower cells is wrapped at about this width


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: `data` for --json, `text` for people.

    `text` may be a rich renderable, or a function that makes one, which --json does not call; the same holds for
    `details`, which -v prints after it. `next_commands` are suggestions, printed to stderr.
    """

    data: dict[str, Any]
    text: Any = None
    exit_code: int = 0
    details: Any = None
    next_commands: Sequence[str] = ()


def print_result(function: Callable[..., CommandResult]) -> Callable[..., int]:
    """Add --json to a command that returns a CommandResult, and print the result."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document as the last line of stdout.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> int:
        _reject_non_finite(kwargs)
        verbose = kwargs.pop("verbose", False)
        result = function(*args, **kwargs)
        if as_json:
            finite = json.loads(json.dumps(result.data), parse_constant=lambda _: None)  # JSON has no NaN or infinity
            click.echo(json.dumps(finite))
            return result.exit_code
        _print(result.text)
        if verbose:
            _print(result.details)
        if result.next_commands:
            _print_next(result.next_commands)
        return result.exit_code

    return wrapper


def _print(text: Any) -> None:
    text = text() if callable(text) else text
    if isinstance(text, str):
        click.echo(text)
    elif text is not None:
        from rich.console import Console

        screen = Console()
        with screen.capture() as shown:  # rich itself would exit with 1 on a closed pipe
            screen.print(text, crop=False)  # no_wrap lines may be longer than the window
        click.echo(shown.get(), nl=False)


def _print_next(commands: Sequence[str]) -> None:
    from rich.text import Text

    lines = f"\n{' ' * len('Next: ')}".join(commands)
    console().print(Text.assemble(("Next: ", "bold"), lines), soft_wrap=True)  # unwrapped: commands can be copied


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


def print_error(error: object) -> None:
    """The only form of errors: one line on stderr, where, what was found, what to do."""
    _print_message("error:", STYLES["bad"], str(error))


def print_warning(text: str) -> None:
    _print_message("warning:", STYLES["warning"], text)


def _print_message(kind: str, style: str, text: str) -> None:
    from rich.text import Text

    console().print(Text.assemble((kind, style), f" {text}"), soft_wrap=True)


def styled(text: str, style: str) -> Text:
    """A table cell in the colour of `style`: good, bad, missing or warning."""
    from rich.text import Text

    return Text(text, STYLES[style])


def fact_rows(rows: Iterable[tuple[str, Any]], title: str | None = None) -> Any:
    """A result as a few rows of name and value, without headings. Rows whose value is None are left out."""
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", padding=(0, 1))
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            result.add_row(name, value if isinstance(value, Text) else Text(_cell(value)))
    return result


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
        # Text: "[train]" is not markup
        result.add_row(*[value if isinstance(value, Text) else Text(_cell(value)) for value in row])
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
