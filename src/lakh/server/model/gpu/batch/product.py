"""Products of the few tokens of a decode batch on Hopper GPUs (product.cu), by programmatic dependent launch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from lakh.server.model.gpu.megakernel.nvrtc import CudaKernel

__all__ = ["MAX_TOKENS", "STEP", "BatchProduct", "Output", "ProductTile", "tile_for"]

TOKENS = (8, 16, 32, 64, 128)  # sizes of a product on tensor cores
MAX_TOKENS = TOKENS[-1]
STEP = 64  # columns that a stage holds
SWIZZLE_BYTES = 1024  # alignment of a stage
ROW_BYTES = 2 * STEP
MAX_SPLITS = 8


class Output(IntEnum):
    PARTS = 0
    """Float32, a sum for each split of the columns: splits x tokens x rows."""
    BF16 = 1
    SWIGLU = 2
    """silu(first half of the rows) * second half, in bf16."""


@dataclass(frozen=True)
class ProductTile:
    groups: int
    """Of four warps; each has 64 rows of the matrix."""
    stages: int
    splits: int
    """Of the columns."""

    def blocks(self, rows: int) -> int:
        return -(-rows // (64 * self.groups)) * self.splits

    def shared_bytes(self, tokens: int) -> int:
        return self.stages * (64 * self.groups + tokens) * ROW_BYTES + SWIZZLE_BYTES


def tile_for(rows: int, columns: int, tokens: int, output: Output, num_sms: int) -> ProductTile:
    """As many splits as keep the blocks at one for each SM."""
    stages = 4 if tokens <= 64 else 3
    splits = 1
    while (
        output == Output.PARTS
        and splits < MAX_SPLITS
        and ProductTile(2, stages, 2 * splits).blocks(rows) <= num_sms
        and columns // STEP >= 2 * splits
    ):
        splits *= 2
    return ProductTile(2, stages, splits)


class BatchProduct:
    """x w^T for a matrix of this size; compiled for some tenths of a second."""

    def __init__(
        self, rows: int, columns: int, tokens: int, output: Output, tile: ProductTile, device: torch.device
    ) -> None:
        if columns % STEP or tokens > MAX_TOKENS or (tile.splits > 1 and output != Output.PARTS):
            raise ValueError(f"no product of {tokens} tokens with {rows} x {columns} in {tile} for {output.name}")
        self.tile = tile
        self._blocks, self._output, self._rows = tile.blocks(rows), output, rows
        padded = next(size for size in TOKENS if size >= tokens)
        defines = {"TOKENS": padded, "NUM_TOKENS": tokens, "NUM_ROWS": rows, "COLUMNS": columns, "OUTPUT": int(output)}
        defines |= {"GROUPS": tile.groups, "STAGES": tile.stages, "SPLITS": tile.splits}
        self._kernel = CudaKernel(
            Path(__file__).with_suffix(".cu").read_text(),
            "batch_product",
            defines,
            threads=128 * tile.groups,
            shared_bytes=tile.shared_bytes(padded),
            device=device,
            pdl=True,
            architecture_specific=True,
        )

    def __call__(self, x_NC: Tensor, w_RC: Tensor) -> Tensor:
        """Starts before the previous kernel has ended, and reads w at once: nothing in the same step may write w."""
        tokens = len(x_NC)
        if self._output == Output.PARTS:
            y = torch.empty(self.tile.splits, tokens, self._rows, device=x_NC.device)
        else:
            rows = self._rows // 2 if self._output == Output.SWIGLU else self._rows
            y = torch.empty(tokens, rows, dtype=x_NC.dtype, device=x_NC.device)
        self._kernel(self._blocks, x_NC, w_RC, y)
        return y
