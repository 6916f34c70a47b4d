"""click groups that import a command only when it is asked for, and groups with a default command."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

__all__ = ["DefaultGroup", "LazyGroup"]


class LazyGroup(click.Group):
    """Takes `commands_table`: name -> ("module:attribute", short help)."""

    def __init__(self, *args: Any, commands_table: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands_table = commands_table

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands_table)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.commands_table:
            return None
        module, _, attribute = self.commands_table[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands_table:
            near = difflib.get_close_matches(args[0], self.commands_table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "lakh --help lists them"
            context.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.commands_table.items()])


class DefaultGroup(click.Group):
    """A group whose first word may also be the argument of its default command: `lakh eval MODEL`."""

    default = ""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and self.default:
            args = [self.default, *args]
        return super().resolve_command(context, args)
