"""lakh corpus plan: how many tasks a build of a given size has, and the memory of a worker."""

from __future__ import annotations

import re

import click

from lakh import config
from lakh.cli.output import CommandResult, print_result, set_option
from lakh.errors import UserError

__all__ = ["plan_command"]

QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([kMGTP]?)(i?)B?")
POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@click.command("plan")
@click.option("--text", required=True, metavar="SIZE", help="Text of all documents, for example 10TB.")
@click.option("--documents", required=True, metavar="N", help="Number of documents, for example 10G.")
@set_option
@print_result
def plan_command(text: str, documents: str, sets: tuple[str, ...]) -> CommandResult:
    """Show the tasks and the memory that a build needs, from its size alone.

    The documents are records in Parquet or JSONL files. The memory of a worker follows from what each step takes for a
    document, which was measured; `near.threshold` changes it, because a lower threshold compares more bands.
    """
    from lakh.corpus import Settings
    from lakh.corpus.build_size import build_size

    settings = config.with_sets(Settings(), sets, origin="corpus settings")
    size = build_size(_quantity("--text", text), _quantity("--documents", documents), settings)
    return CommandResult(size.as_dict(), size.describe())


def _quantity(option: str, text: str) -> int:
    found = QUANTITY.fullmatch(text.strip())
    number = float(found[1]) * (1024 if found[3] else 1000) ** POWERS[found[2]] if found else 0.0
    if number < 1:
        raise UserError(f"{option} {text}", "is not a number of at least 1", "write for example 10TB, 256MiB or 10G")
    return int(number)
