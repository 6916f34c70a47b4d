"""How commands answer: a table or text for people, one JSON document for programs.

A command body returns an `Answer`; `@answers` adds `--json` and prints the right face of it. Progress and talk use
`console()`, which writes to stderr.
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

__all__ = ["Answer", "answers", "console", "set_option", "table"]

set_option = click.option(
    "--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change one setting; may be given several times."
)


SHORT_WORD_CHARS = 8  # columns of such words and of numbers keep their lines; in a narrow window the others fold
HEADING_CHARS = 10  # a field's name (tok_per_s) over narrower cells takes several lines of about so many


@dataclass(frozen=True)
class Answer:
    """What a command found: `data` for --json, `text` (or a rich renderable) for people."""

    data: dict[str, Any]
    text: Any = None
    exit_code: int = 0


def answers(function: Callable[..., Answer]) -> Callable[..., int]:
    """Add --json to a command whose body returns an Answer."""

    @click.option("--json", "as_json", is_flag=True, help="End stdout with one JSON document.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> int:
        _refuse_what_is_no_number(kwargs)
        answer = function(*args, **kwargs)
        if as_json:
            click.echo(json.dumps(_finite(answer.data)))
        elif isinstance(answer.text, str):
            click.echo(answer.text)
        elif answer.text is not None:
            from rich.console import Console

            screen = Console()
            with screen.capture() as shown:  # rich itself would leave with 1 when nobody reads any more
                screen.print(answer.text, crop=False)  # a line that may not be broken is longer than the window
            click.echo(shown.get(), nl=False)
        return answer.exit_code

    return wrapper


def _refuse_what_is_no_number(values: dict[str, Any]) -> None:
    """click reads "nan" and "inf" as numbers; no command can answer with them."""
    for option in click.get_current_context().command.params:
        value = values.get(option.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{option.opts[0]} {value}", "is no finite number", "give one")


def console() -> Console:
    """Where people read progress and talk: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Any:
    """A plain table; numbers align to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    narrowest = 1
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        longest = max((len(_cell(row[index])) for row in rows), default=0)
        whole = numeric or longest <= SHORT_WORD_CHARS
        heading = _heading(column, longest)
        least = max(longest if whole else SHORT_WORD_CHARS, *map(len, heading))
        narrowest += least + 3  # with the space around it
        result.add_column(
            Text("\n".join(heading)),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=least,  # rich cuts digits off to fit a narrow window
        )
    for row in rows:
        result.add_row(*[Text(_cell(value)) for value in row])  # Text: no markup, "[train]" stays
    return _AtLeast(narrowest, result)


@dataclass(frozen=True)
class _AtLeast:
    """A table that is wider than its window rather than without a column: rich leaves nothing of one that may fold."""

    chars: int
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.table, options.update(width=max(self.chars, options.max_width)))


def _heading(column: str, cells_chars: int) -> list[str]:
    """The lines of a heading: a field's name is broken where its parts meet, other headings stay as they are."""
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
    """A value inside another; brackets where it has parts itself."""
    return f"({_cell(value)})" if isinstance(value, dict | list | tuple) else _cell(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
