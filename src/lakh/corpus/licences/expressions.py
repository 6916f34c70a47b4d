"""Is an SPDX licence expression permissive?

licences.toml lists the permissive licences; what is not recognised is not permissive.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lakh.errors import MissingExtra

__all__ = ["PERMISSIVE", "TABLES", "LicenceDecision", "classify_expression"]

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("licences.toml").read_text(encoding="utf-8"))
PERMISSIVE = frozenset(TABLES["permissive"])
DANGLING = re.compile(r"(?i)(?:^|\s)(?:and|or|with)\s*(?:\)|$)")  # an operator without a right side: "MIT OR"


@dataclass(frozen=True)
class LicenceDecision:
    permissive: bool
    licence: str
    """SPDX-like, "" if it is not recognised."""
    reason: str


@lru_cache(maxsize=65_536)  # a corpus has few expressions and many documents; a parse takes up to 0.1 ms
def classify_expression(expression: str) -> LicenceDecision:
    """OR needs one permissive side, AND needs both; WITH only adds permissions."""
    shown = " ".join(expression.split())
    # Characters that SPDX does not allow make an unknown identifier, not a malformed expression.
    words = re.sub(r"[^\w\s().+:\-]", "_", shown)
    tree = None if DANGLING.search(words) else _parse(words)
    if tree is None:
        return LicenceDecision(False, "", f"licence expression {shown!r} is malformed")
    allowed = _is_permissive(tree)
    return LicenceDecision(allowed, shown, f"{shown} is {'permissive' if allowed else 'not known to be permissive'}")


def _parse(expression: str) -> Any:
    """The tree of an expression, None if it is malformed."""
    try:
        from license_expression import Licensing  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("licence expressions", "license-expression", "corpus") from None
    try:
        tree = Licensing().parse(expression)
    except Exception:  # noqa: BLE001 - on malformed input it raises its own errors, IndexError and AssertionError
        return None
    # Without a list of known licences, "A B" parses as one licence with a space in its name.
    return None if tree is None or any(" " in key for key in Licensing().license_keys(tree)) else tree


def _is_permissive(node: Any) -> bool:
    if node.args:
        return (any if type(node).__name__ == "OR" else all)(map(_is_permissive, node.args))
    key = getattr(node, "license_symbol", node).key
    return key.lower().removesuffix("+") in PERMISSIVE
