"""A decorator that compiles a function of the planner with numba (the [plan] extra) and caches it between runs.

Without a writable cache folder (NUMBA_CACHE_DIR moves it) each process compiles again, which takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from lakh.errors import MissingExtra

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    try:
        import numba
    except ImportError:
        raise MissingExtra("the fabric simulator", "numba", "plan") from None
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "no locator available"
        return cast(F, numba.njit(nogil=True)(function))
