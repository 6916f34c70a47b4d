"""lakh recipes: the recipes that come with lakh, by the name that lakh train takes."""

from __future__ import annotations

from typing import Any

import click

from lakh.cli.format import count_text
from lakh.cli.output import CommandResult, print_result, table

__all__ = ["recipes"]


@click.command()
@print_result
def recipes() -> CommandResult:
    """List the recipes that come with lakh.

    A recipe is a Python file with functions that return a run. lakh config show NAME prints one as a run.toml to edit.
    """
    from lakh.spec import load_run
    from lakh.spec.recipes import list_recipes

    rows: list[dict[str, Any]] = []
    for recipe in list_recipes():
        run = load_run(recipe.name)
        rows.append(
            {
                "name": recipe.name,
                "parameters": run.model.parameters,
                "tokens": run.tokens,
                "cluster": run.cluster.name,
                "description": recipe.description,
            }
        )
    cells = [
        (row["name"], count_text(row["parameters"]), count_text(row["tokens"]), row["description"]) for row in rows
    ]
    text = table(["recipe", "parameters", "tokens", "description"], cells)
    next_commands = ["lakh config check laptop", "lakh config show node > run.toml"]
    return CommandResult({"recipes": rows}, text, next_commands=next_commands)
