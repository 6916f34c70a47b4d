"""lakh bench: runs the benchmarks of the `bench` package, which is part of the repository and not of the wheel."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from lakh.cli.groups import LazyGroup
from lakh.errors import UserError

__all__ = ["bench", "bench_module"]


class BenchGroup(LazyGroup):
    """Takes its commands from the `bench` package; without the package, every command says where to get it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, commands_table=_commands(), **kwargs)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if not self.commands_table:
            raise _missing(f"lakh bench {name}")
        return super().get_command(context, name)


def _commands() -> dict[str, tuple[str, str]]:
    """The table of benchmarks from the first checkout: $LAKH_BENCH, the one lakh is imported from, or around here."""
    here = Path.cwd()
    named = [Path(os.environ["LAKH_BENCH"])] if os.environ.get("LAKH_BENCH") else []
    for root in (*named, Path(__file__).resolve().parents[3], here, *here.parents):
        root = root.parent if (root / "harness").is_dir() else root  # LAKH_BENCH may name the package itself
        if (root / "bench" / "harness").is_dir():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            commands: dict[str, tuple[str, str]] = importlib.import_module("bench").COMMANDS
            return commands
    return {}


def bench_module(name: str, command: str) -> ModuleType:
    """A module of the `bench` package, for a command that is a benchmark."""
    if not _commands():
        raise _missing(command)
    return importlib.import_module(f"bench.{name}")


def _missing(command: str) -> UserError:
    todo = "clone the repository and run lakh inside it, or set LAKH_BENCH to the checkout"
    return UserError(command, "the benchmarks are not part of the installed package", todo)


@click.group(cls=BenchGroup)
def bench() -> None:
    """Compare the speed of lakh with its peers, in the same run."""
