"""Audit of claims: recompute each stated value from a formula and mark it "holds", "off by x" or "impossible".

A claims file is TOML: [constants] with names, [[claims]] with id, claim, stated, formula, reason, source and, where
physics forbids a value, `impossible_if`. Formulas are arithmetic over constants, `stated` and `right`, and calls of
FUNCTIONS; nothing else is evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import ConfigError
from lakh.planner.reliability.goodput import best_goodput

__all__ = ["Claim", "ClaimCheck", "Claims", "audit", "evaluate", "load_claims"]

SEED_ARTICLE = Path(__file__).parents[1] / "data" / "seed_article.toml"
TOLERANCE = 0.02  # a claim holds if it is right to two digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    id: str
    claim: str
    stated: float
    formula: str
    source: str
    unit: str = ""
    reason: str = ""
    impossible_if: str = ""
    tolerance: float = TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    title: str
    claims: tuple[Claim, ...]
    constants: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, count in Counter(claim.id for claim in self.claims).items():
            if count > 1:
                raise ConfigError("claims", f"id {name!r} appears twice", "give each claim its own id")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimCheck(Claim):
    right: float
    verdict: str
    """ "holds", "off by 9.9x", or "impossible"."""


def load_claims(path: str | Path | None = None) -> Claims:
    """Read a claims file; without a path, the claims of the seed article."""
    return config.load(Claims, path or SEED_ARTICLE)


def audit(claims: Claims) -> list[ClaimCheck]:
    return [_check(claim, claims.constants) for claim in claims.claims]


def _check(claim: Claim, constants: Mapping[str, float]) -> ClaimCheck:
    where = f"claim {claim.id}"
    right = evaluate(claim.formula, constants, f"{where}, formula")
    known = {**constants, "stated": claim.stated, "right": right}
    if claim.impossible_if and evaluate(claim.impossible_if, known, f"{where}, impossible_if"):
        verdict = "impossible"
    elif right == claim.stated or (right and abs(claim.stated / right - 1) <= claim.tolerance):
        verdict = "holds"
    elif right == 0 or claim.stated == 0 or (right < 0) != (claim.stated < 0):
        verdict = "off"
    else:
        factor = claim.stated / right
        verdict = f"off by {factor:.3g}x" if factor > 1 else f"off by 1/{1 / factor:.3g}"
    return ClaimCheck(**asdict(claim), right=right, verdict=verdict)


# --- formulas ---


FUNCTIONS: dict[str, Callable[..., float]] = {
    **{name: getattr(math, name) for name in ("ceil", "floor", "sqrt", "exp", "log")},
    "min": min,
    "max": max,
    "daly_best": best_goodput,
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}


def evaluate(text: str, names: Mapping[str, float], where: str) -> float:
    """The value of an arithmetic formula; anything else is refused."""
    try:
        value = _value(ast.parse(text, mode="eval").body, names)
        if isinstance(value, complex) or not math.isfinite(value):
            raise ValueError("has no finite value")
        return float(value)
    except KeyError as error:
        known = ", ".join(sorted({*names, *FUNCTIONS}))
        raise ConfigError(where, f"{error.args[0]!r} is not a name", f"known here: {known}") from None
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ConfigError(where, f"{text!r} {error}", "write arithmetic over the constants") from None


def _value(node: ast.AST, names: Mapping[str, float]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand, names))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        return OPERATORS[type(node.ops[0])](_value(node.left, names), _value(node.comparators[0], names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return FUNCTIONS[node.func.id](*(_value(argument, names) for argument in node.args))
    raise ValueError("is not arithmetic")
