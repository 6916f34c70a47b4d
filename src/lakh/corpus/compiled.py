"""A decorator that compiles a function with numba and caches the result between runs.

numba writes beside the source, or into the user's cache folder (NUMBA_CACHE_DIR moves it). If neither is writable, as
in a read-only container without a home, each process compiles again: about ten seconds.

numba itself recompiles a function when its own file changes, although the compiled code contains the functions and
constants of other files. Here a function is recompiled when any file changes in its folder or in the folders of the
compiled functions that its file imports.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    try:
        kernel = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # "no locator available"
        return cast(F, numba.njit(nogil=True)(function))
    cast(Any, kernel)._cache._cache_file._source_stamp = _source_stamp(function)
    return cast(F, kernel)


def _source_stamp(function: Callable[..., Any]) -> str:
    """Changes with the files whose code numba may compile into `function`; replaces numba's stamp of one file."""
    kernels = [value.py_func for value in function.__globals__.values() if hasattr(value, "py_func")]
    folders = {Path(inspect.getfile(one)).parent for one in (function, *kernels)}
    return hashlib.sha256("".join(sorted(map(_folder_stamp, folders))).encode()).hexdigest()


@lru_cache(maxsize=64)
def _folder_stamp(folder: Path) -> str:
    stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.py"))]
    return "".join(f"{name} {stat.st_mtime_ns} {stat.st_size};" for name, stat in stats)
