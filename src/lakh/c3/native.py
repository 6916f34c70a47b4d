"""Finds and opens the native core (native/, a C ABI) with ctypes.

`open_library` returns None where the library was not built (no compiler at install time); everything that needs it
says so. LAKH_C3_LIBRARY names another file, for development builds.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from pathlib import Path

from lakh.errors import UserError

__all__ = ["ABI", "cpu_features", "host_identity", "open_library"]

ABI = 1
FILE = "liblakh_c3.so"


@functools.cache
def open_library() -> ctypes.CDLL | None:
    path = _find()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    found = library.lakh_c3_abi()
    if found != ABI:
        raise UserError(str(path), f"has ABI {found} and lakh needs {ABI}", "install lakh again: pip install .")
    for name in ("lakh_c3_cpu_features", "lakh_c3_host_identity"):
        function = getattr(library, name)
        function.restype = ctypes.c_size_t
        function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return library


def cpu_features() -> list[str]:
    """Vector extensions of this CPU, as the native core sees them."""
    return _text("lakh_c3_cpu_features").split()


def host_identity() -> str:
    """Equal for two processes exactly when they can share memory."""
    return _text("lakh_c3_host_identity")


def _text(function: str) -> str:
    library = open_library()
    if library is None:
        return ""
    buffer = ctypes.create_string_buffer(256)
    getattr(library, function)(buffer, len(buffer))
    return buffer.value.decode()


def _find() -> Path | None:
    if named := os.environ.get("LAKH_C3_LIBRARY"):
        if not Path(named).exists():
            raise UserError(f"LAKH_C3_LIBRARY={named}", "no such file", "mend or unset the variable")
        return Path(named)
    beside = Path(__file__).with_name(FILE)
    if beside.exists():
        return beside
    try:  # an editable install keeps built files in site-packages, not beside the sources
        installed = importlib.metadata.distribution("lakh").locate_file(f"lakh/c3/{FILE}")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(installed)) if Path(str(installed)).exists() else None
