"""Products of the few tokens of a decode batch on Hopper GPUs (product.cu), by programmatic dependent launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from lakh.workloads.code.kernels.cuda.nvrtc import CudaKernel, ptx

__all__ = ["MAX_TOKENS", "STEP", "BatchProduct", "Output", "ProductTile", "defines", "source", "tile_for"]

TOKENS = (8, 16, 32, 64)  # sizes of a product on tensor cores
MAX_TOKENS = TOKENS[-1]
STEP = 64  # columns that a stage holds
SWIZZLE_BYTES = 1024  # alignment of a stage
ROW_BYTES = 2 * STEP
SPLITS = (4, 2, 1)
MAX_SPLITS = SPLITS[0]
# By rows of a tile. With fewer stages an H200 was slower, and so it was when blocks asked for later weights in the L2
# cache (bench/results/serve_NVIDIA-H200_2026-11-18.md).
STAGES = {128: 6, 96: 8, 64: 8}


class Output(IntEnum):
    PARTS = 0
    """Float32, a sum for each split of the columns: splits x tokens x rows."""
    BF16 = 1
    SWIGLU = 2
    """silu(first half of the rows) * second half, in bf16."""


@dataclass(frozen=True)
class ProductTile:
    rows: int
    """Of the matrix, of a block: 64 or 48, or with twice the warps 128 or 96."""
    stages: int
    splits: int
    """Of the columns."""

    @property
    def groups(self) -> int:
        """Of four warps, which multiply 64 rows."""
        return -(-self.rows // 64)

    def blocks(self, rows: int) -> int:
        return -(-rows // self.rows) * self.splits

    def shared_bytes(self, tokens: int) -> int:
        beyond = max(64 * self.groups - self.rows - tokens, 0)  # tensor cores read there what nobody uses
        return (self.stages * (self.rows + tokens) + beyond) * ROW_BYTES + SWIZZLE_BYTES


def tile_for(rows: int, columns: int, output: Output, num_sms: int) -> ProductTile:
    """As many blocks as SMs, by splits of the columns where they are allowed."""
    most = 1 if output != Output.PARTS else max(min(MAX_SPLITS, columns // STEP // 2), 1)
    tiles = [ProductTile(many, STAGES[many], splits) for many in STAGES for splits in SPLITS if splits <= most]
    fitting = [tile for tile in tiles if tile.blocks(rows) <= num_sms]
    return max(fitting, key=lambda tile: tile.blocks(rows), default=tiles[0])


class BatchProduct:
    """x w^T for a matrix of this size."""

    def __init__(
        self, rows: int, columns: int, tokens: int, output: Output, tile: ProductTile, device: torch.device
    ) -> None:
        if (
            columns % STEP
            or tokens > MAX_TOKENS
            or (tile.splits > 1 and output != Output.PARTS)
            or tile.rows % (16 * tile.groups)
        ):
            raise ValueError(f"no product of {tokens} tokens with {rows} x {columns} in {tile} for {output.name}")
        self.tile = tile
        self._blocks, self._output, self._rows = tile.blocks(rows), output, rows
        padded = next(size for size in TOKENS if size >= tokens)
        self._kernel = _kernel(rows, columns, padded, output, tile, device)

    def __call__(self, x_NC: Tensor, w_RC: Tensor) -> Tensor:
        """Starts before the previous kernel has ended, and reads w at once: nothing in the same step may write w."""
        tokens = len(x_NC)
        if self._output == Output.PARTS:
            y = torch.empty(self.tile.splits, tokens, self._rows, device=x_NC.device)
        else:
            rows = self._rows // 2 if self._output == Output.SWIGLU else self._rows
            y = torch.empty(tokens, rows, dtype=x_NC.dtype, device=x_NC.device)
        self._kernel(self._blocks, x_NC, w_RC, y, tokens)
        return y


def source(kernel: str) -> str:
    """Of a kernel of this folder."""
    folder = Path(__file__).parent
    return ptx() + (folder / f"{kernel}.cu").read_text()


def defines(rows: int, columns: int, tokens: int, output: Output, tile: ProductTile) -> dict[str, object]:
    """The macros that product.cu needs."""
    sizes: dict[str, object] = {
        "TOKENS": tokens,
        "NUM_ROWS": rows,
        "COLUMNS": columns,
        "OUTPUT": int(output),
    }
    return sizes | {"GROUPS": tile.groups, "ROWS": tile.rows, "STAGES": tile.stages, "SPLITS": tile.splits}


@functools.cache
def _kernel(
    rows: int, columns: int, tokens: int, output: Output, tile: ProductTile, device: torch.device
) -> CudaKernel:
    """Compiled for some tenths of a second; graphs of other sizes share it."""
    return CudaKernel(
        source("product"),
        "batch_product",
        defines(rows, columns, tokens, output, tile),
        threads=128 * tile.groups,
        shared_bytes=tile.shared_bytes(tokens),
        device=device,
        pdl=True,
        architecture_specific=True,
    )
