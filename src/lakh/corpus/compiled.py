"""A function compiled by numba, and kept compiled between runs where there is a place to keep it.

numba writes beside the source, or into the user's cache folder (NUMBA_CACHE_DIR moves it). Where neither can be
written, as in a read-only container without a home, functions are compiled anew by each process: ten seconds or so.
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
