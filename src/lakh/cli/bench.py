"""lakh bench: runs the benchmarks of the `bench` package, which is part of the repository and not of the wheel."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from lakh.cli.groups import LazyGroup
from lakh.errors import UserError

__all__ = ["bench"]


class BenchGroup(LazyGroup):
    """Takes its commands from the `bench` package; without the package, every command says where to get it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, commands_table=_commands(), **kwargs)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if not self.commands_table:
            found = "the benchmarks are not part of the installed package"
            todo = "clone the repository and run lakh inside it, or set LAKH_BENCH to the checkout"
            raise UserError(f"lakh bench {name}", found, todo)
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


@click.group(cls=BenchGroup)
def bench() -> None:
    """Compare the speed of lakh with its peers, in the same run."""
