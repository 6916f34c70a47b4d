"""A decorator that compiles a function with numba and caches the result between runs.

numba writes beside the source, or into the user's cache folder (NUMBA_CACHE_DIR moves it). If neither is writable, as
in a read-only container without a home, each process compiles again: about ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "no locator available"
        return cast(F, numba.njit(nogil=True)(function))
