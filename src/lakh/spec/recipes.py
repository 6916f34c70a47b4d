"""The recipes that ship with lakh, by the name that `lakh train` takes. Reads their source and does not run it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lakh.spec.cluster import shared_files

__all__ = ["Recipe", "list_recipes"]


@dataclass(frozen=True)
class Recipe:
    name: str
    """laptop, or sizes:code_1b where a file holds several."""
    description: str


def list_recipes() -> list[Recipe]:
    """Every recipe, sorted by file, in the order in which its file defines it."""
    found: list[Recipe] = []
    for stem, path in sorted(shared_files("recipes", ".py").items()):
        module = ast.parse(path.read_text(encoding="utf-8"))
        functions = [
            node for node in module.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        ]
        for function in functions:
            name = stem if len(functions) == 1 else f"{stem}:{function.name}"
            described = function if ast.get_docstring(function) or len(functions) > 1 else module
            found.append(Recipe(name, _first_sentence(ast.get_docstring(described) or "")))
    return found


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")
