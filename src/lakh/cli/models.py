"""`lakh models`: the model architectures that lakh knows."""

from __future__ import annotations

from dataclasses import asdict

import click

from lakh.cli.output import CommandResult, print_result, table

__all__ = ["models"]


@click.command()
@print_result
def models() -> CommandResult:
    """List the model architectures, and what lakh does with each.

    A Hugging Face directory of a class that lakh serves is a MODEL for lakh serve, lakh export and lakh eval, and the
    init_from of a run. The name is the value of model.family.
    """
    from lakh.workloads.code.architectures import listing

    rows = listing.rows()
    data = {"models": [asdict(row) for row in rows]}
    yes = {True: "yes", False: "-"}
    cells = [
        (row.name, row.hugging_face, yes[row.trains], yes[row.serves], ", ".join(row.exports) or "-", yes[row.plans],
         yes[row.fim])
        for row in rows
    ]  # fmt: skip
    return CommandResult(data, table(["name", "Hugging Face", "trains", "serves", "exports", "plans", "fim"], cells))
