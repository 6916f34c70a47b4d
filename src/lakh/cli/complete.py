"""Values that the shell completes: recipes, runs, models, tasks, settings and paths.

Each function is the `shell_complete` of an option or argument. Imports are local: completion runs at every Tab.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

    from lakh.config import Setting

__all__ = [
    "complete_clusters",
    "complete_folders",
    "complete_plan_models",
    "complete_pretrained",
    "complete_recipes",
    "complete_runs",
    "complete_settings",
    "complete_tasks",
]

RUN_GLOBS = ("run.toml", "*/run.toml", "*/*/run.toml")
MAX_RUNS = 50


def complete_recipes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Recipes that ship with lakh, runs here, and files."""
    from lakh.cli.recipe_list import list_recipes

    recipes = [(recipe.name, recipe.description) for recipe in list_recipes()]
    return [*_paths("file", incomplete), *_items([*recipes, *_runs_here()], incomplete)]


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Run folders here, and other folders: a run, a checkpoint or a Hugging Face directory."""
    return [*_paths("dir", incomplete), *_items(_runs_here(), incomplete)]


def complete_folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _paths("dir", incomplete)


def complete_clusters(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from lakh.spec.cluster import shared_files

    names = [(name, "") for name in sorted(shared_files("clusters", ".toml"))]
    return [*_paths("file", incomplete), *_items(names, incomplete)]


def complete_pretrained(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from lakh.workloads.code.pretrained import PRETRAINED

    return _items([(model.name, model.description) for model in PRETRAINED.values()], incomplete)


def complete_plan_models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from lakh import config
    from lakh.planner.catalogue import DATA

    names = [(name, "") for name in config.read_toml(DATA / "models.toml")]
    return [*_paths("file", incomplete), *_items(names, incomplete)]


def complete_tasks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Benchmarks; of a list with commas, its last name."""
    from lakh.evals.perplexity import BITS_PER_BYTE
    from lakh.evals.tasks import TASKS

    before, comma, last = incomplete.rpartition(",")
    given = set(before.split(","))
    names = [(f"{before}{comma}{name}", "") for name in [*TASKS, BITS_PER_BYTE] if name not in given]
    return _items(names, before + comma + last)


def complete_settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """PATH= of every setting of a run; after the equals sign, the values of a choice."""
    from lakh import config
    from lakh.spec import Run

    path, equals, _ = incomplete.partition("=")
    known = {setting.path: setting for setting in config.settings(Run)}
    if not equals:
        return _items([(f"{name}=", setting.doc.partition("\n")[0]) for name, setting in known.items()], incomplete)
    return _items([(f"{path}={value}", "") for value in _choices(known.get(path))], incomplete)


def _choices(setting: Setting | None) -> list[str]:
    """The values of a setting whose type lists them: one of 'a', 'b'; true or false."""
    if setting is None:
        return []
    return ["true", "false"] if setting.type == "true or false" else re.findall(r"'([^']+)'", setting.type)


def _runs_here() -> Iterable[tuple[str, str]]:
    found = [path.parent for pattern in RUN_GLOBS for path in Path().glob(pattern)]
    return [(str(path), "a run") for path in sorted(found)[:MAX_RUNS]]


def _items(values: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(value, help=text or None) for value, text in values if value.startswith(incomplete)]


def _paths(kind: str, incomplete: str) -> list[CompletionItem]:
    """Tells the shell to complete files or folders by itself. It comes first: bash forgets what came before it."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]
