"""Triton kernel for the product of two matrices of 8-bit integers with a scale for each row.

For GPUs other than Hopper, where the one in cuda/ is faster: Triton waits there for each product of integers
before it starts the next one. int8_product.py chooses.

Import only where a GPU is used. tests/gpu compares it with plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["int8_product"]

_TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 128, "num_warps": 8, "num_stages": 3}
_GROUP = 8
"""Tiles of neighbouring rows that run at the same time, so that they read the same rows of b from L2."""


@triton.jit
def _int8_product(
    a, b, y, a_scale, b_scale, N, M, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles_N, tiles_M = tl.cdiv(N, ROWS), tl.cdiv(M, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_N * tiles_M, PROGRAMS, flatten=True):
        first = tile // (GROUP * tiles_M) * GROUP
        rows = min(tiles_N - first, GROUP)
        at_N = (first + tile % (GROUP * tiles_M) % rows) * ROWS
        at_M = tile % (GROUP * tiles_M) // rows * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.int32)
        for k in range(tl.cdiv(K, DEPTH)):
            total = tl.dot(a.load([at_N, k * DEPTH]), b.load([at_M, k * DEPTH]).T, total, out_dtype=tl.int32)
        n, m = at_N + tl.arange(0, ROWS), at_M + tl.arange(0, COLUMNS)
        of_row, of_column = tl.load(a_scale + n, mask=n < N, other=0.0), tl.load(b_scale + m, mask=m < M, other=0.0)
        y.store([at_N, at_M], (total.to(tl.float32) * of_row[:, None] * of_column[None, :]).to(tl.bfloat16))


def int8_product(a_NK: Tensor, a_scale: Tensor, b_MK: Tensor, b_scale: Tensor, y_NM: Tensor) -> None:
    (N, K), M = a_NK.shape, b_MK.shape[0]
    rows, columns, depth = _TILE["ROWS"], _TILE["COLUMNS"], _TILE["DEPTH"]
    tiles = triton.cdiv(N, rows) * triton.cdiv(M, columns)
    programs = min(tiles, torch.cuda.get_device_properties(a_NK.device).multi_processor_count if a_NK.is_cuda else 2)
    _int8_product[(programs,)](
        TensorDescriptor.from_tensor(a_NK, [rows, depth]),
        TensorDescriptor.from_tensor(b_MK, [columns, depth]),
        TensorDescriptor.from_tensor(y_NM, [rows, columns]),
        a_scale, b_scale, N, M, K, GROUP=_GROUP, PROGRAMS=programs, **_TILE,
    )  # fmt: skip
