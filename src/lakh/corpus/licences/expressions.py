"""Is an SPDX licence expression permissive?

Permissive means: the text may be copied and changed for any purpose, without an obligation to publish derived work.
What is not recognised is not permissive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lakh.errors import MissingExtra

__all__ = ["PERMISSIVE", "LicenceDecision", "classify_expression"]

# SPDX identifiers, lower case.
PERMISSIVE = frozenset({
    "0bsd", "afl-3.0", "apache-1.1", "apache-2.0", "artistic-2.0", "blueoak-1.0.0", "bsd-1-clause", "bsd-2-clause",
    "bsd-2-clause-patent", "bsd-3-clause", "bsd-3-clause-clear", "bsd-3-clause-lbnl", "bsd-4-clause", "bsl-1.0",
    "bzip2-1.0.6", "cc0-1.0", "cnri-python", "curl", "hpnd", "icu", "isc", "libpng", "libpng-2.0", "mit", "mit-0",
    "mit-cmu", "mit-modern-variant", "ms-pl", "ncsa", "openssl", "postgresql", "psf-2.0", "python-2.0",
    "python-2.0.1", "tcl", "unicode-3.0", "unicode-dfs-2016", "unlicense", "upl-1.0", "w3c", "wtfpl", "x11", "zlib",
    "zpl-2.0", "zpl-2.1",
})  # fmt: skip
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
