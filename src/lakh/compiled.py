"""A decorator that compiles a function with numba, once for all processes of a machine.

numba writes beside the source, or into the user's cache folder (NUMBA_CACHE_DIR moves it). If neither is writable, as
in a read-only container without a home, each process compiles again, which takes a minute for all lexers.

It differs from numba's own cache in two ways. A function is recompiled when any file changes in its folder or in the
folders of the compiled functions that its file imports, because the compiled code contains their functions and
constants. And processes that need the same function at the same time wait for the first one instead of compiling it
once each.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])
WAIT_FOR_OTHERS_S = 600.0  # for another process that compiles the same function; then this one compiles it, too
POLL_S = 0.05


def compiled(function: F) -> F:
    kernel: Any = numba.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # "no locator available"
        kernel._cache = SharedCache(function)
    return cast(F, kernel)


class SharedCache(FunctionCache):
    """numba's cache of one function on disk. Between a miss and the result, its process holds a lock.

    Compiling a function may compile the ones that it calls, each with a lock of its own. Calls have no cycles, so
    processes never wait for each other in a circle.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = _source_stamp(function)  # replaces numba's stamp of one file
        self._lock: int | None = None

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        found = super().load_overload(signature, target_context)
        if found is None and self._lock is None:
            self._acquire()
            found = super().load_overload(signature, target_context)
            if found is not None:
                self._release()
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        super().save_overload(signature, data)
        self._release()

    def _acquire(self) -> None:
        self._impl.locator.ensure_cache_path()
        lock = os.open(Path(self.cache_path) / f"{self._impl.filename_base}.lock", os.O_CREAT | os.O_RDWR, 0o666)
        until_s = time.monotonic() + WAIT_FOR_OTHERS_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until_s:
                    time.sleep(POLL_S)
                    continue
            except OSError:  # a file system without locks
                pass
            self._lock = lock
            return

    def _release(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
            os.close(self._lock)
            self._lock = None


def _source_stamp(function: Callable[..., Any]) -> str:
    """Changes with the files whose code numba may compile into `function`."""
    kernels = [value.py_func for value in function.__globals__.values() if hasattr(value, "py_func")]
    folders = {Path(inspect.getfile(one)).parent for one in (function, *kernels)}
    return hashlib.sha256("".join(sorted(map(_folder_stamp, folders))).encode()).hexdigest()


@lru_cache(maxsize=64)
def _folder_stamp(folder: Path) -> str:
    stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.py"))]
    return "".join(f"{name} {stat.st_mtime_ns} {stat.st_size};" for name, stat in stats)
