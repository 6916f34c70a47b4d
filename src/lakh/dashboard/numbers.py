"""Numbers from files that lakh may not have written: what is not a finite number becomes None."""

from __future__ import annotations

from typing import Any

__all__ = ["MOST", "counts", "finite"]


MOST = 1e300  # a whole number of any length compares with this, and does not with math.isfinite


def finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < MOST else None


def counts(table: Any) -> dict[str, float]:
    """The entries of a table of counts that are numbers other than zero."""
    if not isinstance(table, dict):
        return {}
    found = {str(name): finite(value) for name, value in table.items()}
    return {name: value for name, value in found.items() if value}
