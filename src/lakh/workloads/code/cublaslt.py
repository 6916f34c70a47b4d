"""cuBLASLt's algorithms for a product of two bf16 matrices: listed, and run, by its C interface.

torch asks this library for one algorithm, the first of a list that a heuristic has ordered. Others of the list may be
faster (products.py measures that). The library is the one that torch has loaded; no other is looked for.

Row by row, C = A B. The library counts columns, to which the same memory is C' = B' A': its first operand is our
second.

Cost: a call from Python, some 20 us. Knows contiguous matrices and their transposes, nothing of autograd. Fails with
RuntimeError and the library's status; where torch has not loaded it, `library` is None.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Algorithm", "Form", "Library", "form_of", "library"]

WORKSPACE_BYTES = 64 << 20
MOST_CANDIDATES = 12

# From cublasLt.h, cublas_api.h and library_types.h of CUDA 13.
_BF16, _FLOAT32, _COMPUTE_FLOAT32 = 14, 0, 68
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _MOST_WORKSPACE = 3, 4, 1

_Pointer = ctypes.c_void_p


class Form(NamedTuple):
    """The shape of a product (M x K times K x N), and which operands are transposes of contiguous matrices."""

    M: int
    N: int
    K: int
    is_a_turned: bool
    is_b_turned: bool

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K


def form_of(a: Tensor, b: Tensor) -> Form | None:
    """None where an operand lies in memory in another way."""
    turned = _is_turned(a), _is_turned(b)
    if turned[0] is None or turned[1] is None:
        return None
    return Form(a.shape[0], b.shape[1], a.shape[1], turned[0], turned[1])


def _is_turned(x: Tensor) -> bool | None:
    rows, columns = x.shape
    if x.stride() == (columns, 1):
        return False
    return True if x.stride() == (1, rows) else None


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Algorithm(NamedTuple):
    """One way to compute products of one form."""

    operation: _Pointer
    first: _Pointer
    second: _Pointer
    result: _Pointer
    found: _Found


class Library:
    def __init__(self, path: str) -> None:
        self._lt = ctypes.CDLL(path)
        self._handle = _Pointer()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._workspaces: dict[int, Tensor] = {}

    def algorithms(self, form: Form) -> list[Algorithm]:
        """What the heuristic knows for this form, the one it likes best first."""
        M, N, K, is_a_turned, is_b_turned = form
        operation = _Pointer()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(operation), _COMPUTE_FLOAT32, _FLOAT32)
        for attribute, turned in ((_TRANSPOSE_FIRST, is_b_turned), (_TRANSPOSE_SECOND, is_a_turned)):
            value = ctypes.c_int32(turned)
            self._call("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.byref(value), _size(4))
        first = self._layout(K, N) if is_b_turned else self._layout(N, K)
        second = self._layout(M, K) if is_a_turned else self._layout(K, M)
        result = self._layout(N, M)
        preference, most = _Pointer(), ctypes.c_uint64(WORKSPACE_BYTES)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, ctypes.byref(most), _size(8))
        found, count = (_Found * MOST_CANDIDATES)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, operation, first, second, result, result, preference,
            MOST_CANDIDATES, found, ctypes.byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [Algorithm(operation, first, second, result, one) for one in found[: count.value] if one.state == 0]

    def run(self, algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> None:
        """out = a @ b, on the current stream; the matrices are of the form that the algorithm was asked for."""
        stream = torch.cuda.current_stream(a.device).cuda_stream
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)
        workspace = self._workspaces[stream]
        self._call(
            "cublasLtMatmul", self._handle, algorithm.operation, ctypes.byref(self._one),
            _Pointer(b.data_ptr()), algorithm.first, _Pointer(a.data_ptr()), algorithm.second, ctypes.byref(self._zero),
            _Pointer(out.data_ptr()), algorithm.result, _Pointer(out.data_ptr()), algorithm.result,
            ctypes.byref(algorithm.found.algorithm), _Pointer(workspace.data_ptr()), _size(WORKSPACE_BYTES),
            _Pointer(stream),
        )  # fmt: skip

    def _layout(self, rows: int, columns: int) -> _Pointer:
        layout = _Pointer()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _BF16, *sizes)
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lt, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}")


def _size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


@functools.cache
def library(device_index: int) -> Library | None:
    """The library for a GPU, which must be the current one; None where torch has not loaded it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in maps if "libcublasLt.so" in line), None)
    return None if path is None else Library(path)
