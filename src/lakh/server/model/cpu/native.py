"""The native engine library (native/engine): a decoder as a graph, through ctypes.

The structures and functions are those of native/engine/lakh_engine.h. `open_library` returns None if the library was
not built (no compiler at install time). LAKH_ENGINE_LIBRARY selects another file, for development builds, and
LAKH_ENGINE_KERNELS other kernels than the default of this CPU. Independent of torch.
"""

from __future__ import annotations

import ctypes
import functools
import os

from lakh.errors import UserError
from lakh.native_library import open_native_library

__all__ = [
    "EngineCache",
    "EngineExperts",
    "EngineGraph",
    "EngineMatrices",
    "EngineNode",
    "EngineOperand",
    "EnginePiece",
    "EnginePlaces",
    "EngineScores",
    "open_library",
]

ABI = 11
KERNELS_VARIABLE = "LAKH_ENGINE_KERNELS"
_whole, _address = ctypes.c_int64, ctypes.c_void_p


class EnginePiece(ctypes.Structure):
    """A row of PackedMatrix.table."""

    _fields_ = tuple((name, _whole) for name in ("bits", "values", "scales", "minimums", "rows"))


class EngineMatrices(ctypes.Structure):
    _fields_ = (("pieces", _address), ("num_pieces", _whole))


class EngineCache(ctypes.Structure):
    _fields_ = (
        *((name, _address) for name in ("keys", "values", "key_scales", "value_scales")),
        ("capacity", _whole),
    )


class EnginePlaces(ctypes.Structure):
    _fields_ = (("num", _whole), *((name, _address) for name in ("slots", "starts", "lengths")))


class EngineScores(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("bound", ctypes.c_float), ("window", _whole), ("sinks", _address))


class EngineExperts(ctypes.Structure):
    _fields_ = (
        *((name, _whole) for name in ("count", "width", "ffn")),
        *((name, EngineMatrices) for name in ("gate_up", "down")),
        ("gate_up_bias", _address),
    )


class EngineOperand(ctypes.Structure):
    _fields_ = (("buffer", _whole), ("offset", _whole), ("strides", _whole * 3), ("numbers", _address))


class EngineNode(ctypes.Structure):
    _fields_ = (
        *(("kind", _whole), ("sizes", _whole * 3), ("out", EngineOperand), ("inputs", EngineOperand * 3)),
        *(("whole", _whole * 2), ("real", ctypes.c_double), ("weights", _address)),
    )


class EngineGraph(ctypes.Structure):
    _fields_ = (
        *(("nodes", _address), ("num_nodes", _whole), ("buffers", _address)),
        *((name, _whole) for name in ("num_buffers", "first", "last")),
        *((name, EnginePiece) for name in ("embedding", "head")),
        *((name, _address) for name in ("cos", "sin")),
        *((name, _whole) for name in ("tables", "positions", "rotary", "layers", "kv_heads", "size")),
        ("logit_bound", ctypes.c_float),
    )


@functools.cache
def open_library() -> ctypes.CDLL | None:
    """The library, or None if it was not built."""
    library = open_native_library("server/model/cpu/liblakh_engine.so", ABI, variable="LAKH_ENGINE_LIBRARY")
    if library is None:
        return None
    cache, places = ctypes.POINTER(EngineCache), ctypes.POINTER(EnginePlaces)
    library.lakh_engine_matmul.argtypes = [_address, _whole, _whole, _address, _whole, _address]
    scores, experts = ctypes.POINTER(EngineScores), ctypes.POINTER(EngineExperts)
    library.lakh_engine_attend.argtypes = [cache, places, scores, _whole, _whole, _whole, _address, _address]
    library.lakh_engine_run_experts.argtypes = [experts, _address, _whole, _whole, _address, _address, _address]
    library.lakh_engine_forward.argtypes = [
        *(ctypes.POINTER(EngineGraph), cache, places),
        *(_address, _whole, _address, _address),
    ]
    library.lakh_engine_check.argtypes = [ctypes.POINTER(EngineGraph)]
    library.lakh_engine_kernels.restype = library.lakh_engine_selected.restype = ctypes.c_char_p
    wanted = os.environ.get(KERNELS_VARIABLE)
    if wanted and library.lakh_engine_select(wanted.encode()) != 0:
        known = library.lakh_engine_kernels().decode().split()
        raise UserError(f"{KERNELS_VARIABLE}={wanted}", "this CPU has no such kernels", f"choose {', '.join(known)}")
    return library
