"""Tiles of a matrix in global memory that a kernel copies with one instruction (TMA)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from lakh.workloads.code.kernels.cuda.nvrtc import check, driver

__all__ = ["TensorMap"]

BYTES, ALIGNMENT = 128, 64
UINT8 = 0  # CUtensorMapDataType
SWIZZLE_128 = 3  # CUtensorMapSwizzle
PROMOTE_TO_128 = 2  # CUtensorMapL2promotion: bytes that L2 reads at once


class TensorMap:
    """Of a contiguous matrix of bytes: tiles of `rows` rows and `columns` columns, at most 256 and 128.

    In shared memory their rows are swizzled as tensor cores read them. What lies outside of the matrix is zero.
    """

    def __init__(self, matrix: Tensor, rows: int, columns: int) -> None:
        height, width = matrix.shape
        if not matrix.is_contiguous() or matrix.element_size() != 1 or width % 16:
            raise ValueError(f"a matrix of {tuple(matrix.shape)} {matrix.dtype} has no tiles of bytes")
        self._matrix = matrix  # the map holds its address only
        self._memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // ALIGNMENT) * ALIGNMENT
        check(
            driver().cuTensorMapEncodeTiled(
                ctypes.c_void_p(self.address), UINT8, 2, ctypes.c_void_p(matrix.data_ptr()),
                (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(width),
                (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1),
                0, SWIZZLE_128, PROMOTE_TO_128, 0,
            )
        )  # fmt: skip
