"""Programs that are almost right: reference solutions with one small change, and with results of an odd type.

The same seed gives the same mutants. Some are equivalent to their original, and those pass.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Sequence

from lakh.evals.generation.samples import Sample
from lakh.evals.task import Problem

__all__ = ["mutants_of"]

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Div, ast.Div: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
# What a wrapper makes of the result `r`: the types and values that comparisons treat specially.
_RESULTS = (
    "tuple(r) if isinstance(r, list) else r",
    "list(r) if isinstance(r, tuple) else r",
    "float(r) if isinstance(r, int) else r",
    "int(r) if isinstance(r, float) and r == r and abs(r) < 1e300 else r",
    "r + 1e-9 if isinstance(r, float) else r",
    "r * (1 + 1e-8) if isinstance(r, float) else r",
    "r + 1e-5 if isinstance(r, float) else r",
    "[x + 1e-9 if isinstance(x, float) else x for x in r] if isinstance(r, list) else r",
    "[float(x) if type(x) is int else x for x in r] if isinstance(r, list) else r",
    "[tuple(x) if isinstance(x, list) else x for x in r] if isinstance(r, list) else r",
    "int(r) if isinstance(r, bool) else r",
    "bool(r) if isinstance(r, int) and r in (0, 1) else r",
    "str(r)",
    "r or None",
    "r if r else []",
    "[r]",
    "iter(r) if isinstance(r, list) else r",
    "float('nan') if isinstance(r, float) else r",
    "float('inf') if isinstance(r, float) and r > 1e6 else r",
    "type('Sub', (type(r),), {})(r) if type(r) in (int, float, str, list, dict) else r",
    "dict(sorted(r.items())) if isinstance(r, dict) else r",
    "set(r) if isinstance(r, list) and all(isinstance(x, (int, str)) for x in r) else r",
)


def mutants_of(problems: Sequence[Problem], count: int, seed: int) -> list[Sample]:
    """`count` whole programs, in turn with one changed operator or constant and with a changed result."""
    generator = random.Random(seed)
    samples: list[Sample] = []
    while len(samples) < count:
        problem = generator.choice(problems)
        make = _changed if len(samples) % 2 else _with_odd_result
        text = make(problem, generator)
        if text is not None:
            samples.append(Sample(problem.id, text, whole=True))
    return samples


def _with_odd_result(problem: Problem, generator: random.Random) -> str:
    name = problem.entry_point
    return (
        f"{problem.prompt}{problem.canonical}\n_right = {name}\n"
        f"def {name}(*given):\n    r = _right(*given)\n    return {generator.choice(_RESULTS)}\n"
    )


def _changed(problem: Problem, generator: random.Random) -> str | None:
    tree = ast.parse(problem.prompt + problem.canonical)
    places = [place for place, node in enumerate(ast.walk(tree)) if _can_change(node)]
    if not places:
        return None
    changed = copy.deepcopy(tree)
    node = list(ast.walk(changed))[generator.choice(places)]
    if isinstance(node, ast.Constant):
        node.value = node.value + generator.choice((-1, 1))  # type: ignore[operator]
    elif isinstance(node, ast.Compare):
        node.ops[0] = _OTHER[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        node.op = _OTHER[type(node.op)]()  # type: ignore[assignment]
    return ast.unparse(ast.fix_missing_locations(changed)) + "\n"


def _can_change(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in _OTHER
    return isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _OTHER
