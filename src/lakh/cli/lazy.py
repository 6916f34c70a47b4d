"""click groups: help in whole lines, a hint at what was meant; commands imported when asked for; a default command."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

__all__ = ["DefaultGroup", "Group", "LazyGroup"]

SHORT_HELP_CHARS = 200  # more than any: click would cut lines at 45


class Group(click.Group):
    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(context)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"{context.command_path} --help lists them"
            context.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.help_of(name)) for name in self.list_commands(context)])

    def help_of(self, name: str) -> str:
        return self.commands[name].get_short_help_str(SHORT_HELP_CHARS)


class LazyGroup(Group):
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

    def help_of(self, name: str) -> str:
        return self.commands_table[name][1]


class DefaultGroup(Group):
    """A group whose first word may also be the argument of its default command: `lakh eval MODEL`."""

    default = ""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and self.default:
            args = [self.default, *args]
        return super().resolve_command(context, args)
