"""`compiled` of lakh.compiled, with an error that names the [plan] extra where numba is missing."""

from __future__ import annotations

from lakh.errors import MissingExtra

try:
    from lakh.compiled import compiled
except ModuleNotFoundError:
    raise MissingExtra("the fabric simulator", "numba", "plan") from None

__all__ = ["compiled"]
