"""The native engine library (native/engine): layers of a decoder, through ctypes.

The structures and functions are those of native/engine/lakh_engine.h. `open_library` returns None if the library was
not built (no compiler at install time). LAKH_ENGINE_LIBRARY selects another file, for development builds. Independent
of torch.
"""

from __future__ import annotations

import ctypes
import functools

from lakh.native_library import open_native_library

__all__ = [
    "EngineCache",
    "EngineExperts",
    "EngineMatrices",
    "EngineModel",
    "EnginePiece",
    "EnginePlaces",
    "EngineScores",
    "open_library",
]

ABI = 5
_whole, _address = ctypes.c_int64, ctypes.c_void_p


class EnginePiece(ctypes.Structure):
    """A row of PackedMatrix.table."""

    _fields_ = tuple((name, _whole) for name in ("bits", "values", "scales", "minimums", "rows"))


class EngineMatrices(ctypes.Structure):
    _fields_ = (("pieces", _address), ("num_pieces", _whole))


class EngineModel(ctypes.Structure):
    _fields_ = (
        *((name, _whole) for name in ("layers", "width", "heads", "kv_heads", "size", "ffn")),
        *((name, EngineMatrices) for name in ("qkv", "o", "gate_up", "down")),
        *((name, EnginePiece) for name in ("embedding", "head")),
        *((name, _address) for name in ("norms", "head_norms", "qkv_bias", "cos", "sin")),
        ("eps", ctypes.c_float),
    )


class EngineCache(ctypes.Structure):
    _fields_ = (
        *((name, _address) for name in ("keys", "values", "key_scales", "value_scales")),
        ("capacity", _whole),
    )


class EnginePlaces(ctypes.Structure):
    _fields_ = (("num", _whole), *((name, _address) for name in ("slots", "starts", "lengths")))


class EngineScores(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("bound", ctypes.c_float), ("sinks", _address))


class EngineExperts(ctypes.Structure):
    _fields_ = (
        *((name, _whole) for name in ("count", "width", "ffn")),
        *((name, EngineMatrices) for name in ("gate_up", "down")),
        ("gate_up_bias", _address),
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
        *(ctypes.POINTER(EngineModel), cache, places),
        *(_address, _whole, _address, _address),
    ]
    library.lakh_engine_kernels.restype = ctypes.c_char_p
    return library
