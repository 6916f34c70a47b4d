"""click groups: uncut help lines, suggestions for unknown names, lazily imported commands, and a default command."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click
from click.shell_completion import CompletionItem

from lakh.cli.interrupts import end_on_interrupt
from lakh.errors import UserError

__all__ = ["DefaultGroup", "HintingGroup", "LazyGroup"]

SHORT_HELP_CHARS = 200  # longer than any help line: click would cut at 45


class HintingGroup(click.Group):
    """Suggests the nearest name for an unknown command and lists commands with uncut help lines."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = args and not args[0].startswith("-") and self.get_command(context, args[0]) is None
        if unknown and not context.resilient_parsing:  # shell completion goes on
            near = difflib.get_close_matches(args[0], self.list_commands(context), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"{context.command_path} --help lists them"
            raise UserError(context.command_path, f"no such command {args[0]!r}", hint)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.short_help_of(name)) for name in self.list_commands(context)]
        if rows:  # lakh bench has none outside a checkout
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def short_help_of(self, name: str) -> str:
        return self.commands[name].get_short_help_str(SHORT_HELP_CHARS)


class LazyGroup(HintingGroup):
    """Imports a command on first use.

    `commands_table` maps a name to ("module:attribute", short help); `aliases` maps hidden names to listed ones.
    """

    def __init__(
        self,
        *args: Any,
        commands_table: dict[str, tuple[str, str]],
        aliases: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.commands_table = commands_table
        self.aliases = aliases or {}

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands_table)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        name = self.aliases.get(name, name)
        if name not in self.commands_table:
            return None
        module, _, attribute = self.commands_table[name][0].partition(":")
        with end_on_interrupt():
            command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def short_help_of(self, name: str) -> str:
        return self.commands_table[name][1]


class DefaultGroup(HintingGroup):
    """A group whose first word may also be the argument of its default command: `lakh eval MODEL`."""

    default = ""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and self.default:
            args = [self.default, *args]
        return super().resolve_command(context, args)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, and values of the default command's first argument."""
        found = super().shell_complete(context, incomplete)
        arguments = [item for item in self.commands[self.default].params if isinstance(item, click.Argument)]
        return [*(arguments[0].shell_complete(context, incomplete) if arguments else []), *found]
