"""Boxes of a tensor in global memory that a kernel copies with one instruction (TMA)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from lakh.workloads.code.kernels.cuda.nvrtc import check, driver

__all__ = ["TensorMap", "tiles"]

BYTES, ALIGNMENT = 128, 64
UINT8 = 0  # CUtensorMapDataType
SWIZZLE_128 = 3  # CUtensorMapSwizzle
PROMOTE_TO_128 = 2  # CUtensorMapL2promotion: bytes that L2 reads at once


class TensorMap:
    """Of bytes from the start of `tensor`: `sizes` and `box` of each dimension, the contiguous one first, and for the
    others `strides`. A box has at most 256 in each dimension, and 128 in the first.

    In shared memory rows of 128 bytes are swizzled as tensor cores read them. What lies outside of the sizes is zero.
    """

    def __init__(self, tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        if any(stride % 16 for stride in strides) or tensor.data_ptr() % 16:
            raise ValueError(f"strides of {list(strides)} bytes at {tensor.data_ptr():#x} are not divisible by 16")
        self._tensor = tensor  # the map holds its address only
        self._memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // ALIGNMENT) * ALIGNMENT
        dims = len(sizes)
        check(
            driver().cuTensorMapEncodeTiled(
                ctypes.c_void_p(self.address), UINT8, dims, ctypes.c_void_p(tensor.data_ptr()),
                (ctypes.c_uint64 * dims)(*sizes), (ctypes.c_uint64 * (dims - 1))(*strides),
                (ctypes.c_uint32 * dims)(*box), (ctypes.c_uint32 * dims)(*(1 for _ in sizes)),
                0, SWIZZLE_128, PROMOTE_TO_128, 0,
            )
        )  # fmt: skip


def tiles(matrix: Tensor, rows: int, columns: int) -> TensorMap:
    """Tiles of `rows` rows and `columns` columns of a contiguous matrix of bytes."""
    height, width = matrix.shape
    if not matrix.is_contiguous() or matrix.element_size() != 1 or width % 16:
        raise ValueError(f"a matrix of {tuple(matrix.shape)} {matrix.dtype} has no tiles of bytes")
    return TensorMap(matrix, (width, height), (width,), (columns, rows))
