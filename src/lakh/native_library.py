"""Find and open the shared libraries that are built from native/ when lakh is installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from pathlib import Path

from lakh.errors import UserError

__all__ = ["open_native_library"]


def open_native_library(path: str, abi: int, *, variable: str) -> ctypes.CDLL | None:
    """The library at `path` inside the package, or None if it was not built (no compiler at install time).

    The environment variable `variable` selects another file, for development builds. `liblakh_X.so` exports
    `lakh_X_abi`, which must return `abi`.
    """
    found = _find(path, variable)
    if found is None:
        return None
    todo = "install lakh again, so that the library is built on this machine from the same sources"
    try:
        library = ctypes.CDLL(str(found))
    except OSError as error:
        raise UserError(str(found), f"cannot be loaded ({error})", todo) from None
    name = f"{Path(path).stem.removeprefix('lib')}_abi"
    try:
        built = getattr(library, name)()
    except AttributeError:
        raise UserError(str(found), f"has no function {name}", todo) from None
    if built != abi:
        raise UserError(str(found), f"has ABI {built}, and this lakh needs {abi}", todo)
    return library


def _find(path: str, variable: str) -> Path | None:
    if named := os.environ.get(variable):
        if not Path(named).exists():
            raise UserError(f"{variable}={named}", "no such file", "correct or unset the variable")
        return Path(named)
    beside = Path(__file__).parent / path
    if beside.exists():
        return beside
    try:  # an editable install keeps built files in site-packages, not beside the sources
        installed = Path(str(importlib.metadata.distribution("lakh").locate_file(f"lakh/{path}")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return installed if installed.exists() else None
