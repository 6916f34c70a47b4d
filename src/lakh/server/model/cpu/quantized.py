"""Weights of 8 or 4 bits a number, in groups of 32 with a float16 scale, and their products in native code.

The layout and the kernels (NEON dot product, AVX2, AVX-512 VNNI, portable; chosen at run time) are native/engine's.
Without that library (native.py) int8 runs on numba's kernel (kernels.py) with plain rows, and int4 is refused.

8 bits are the numbers of GGUF's Q8_0, or have a minimum beside the scale; 4 bits have one, as Q4_1 has. A matrix
consists of pieces, some of its rows in one format: q, k and v of a fused matrix may differ, as they do in GGUF files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lakh.server.model.cpu.large_pages import place
from lakh.server.model.cpu.native import open_library
from lakh.workloads.code.formats.gguf_types import GroupedIntegers

__all__ = ["GROUP", "Piece", "QuantizedMatrix", "linear", "pack", "quantize", "use_threads"]

GROUP = 32  # numbers that share a scale
BLOCK_ROWS = 8  # rows that are stored together


class Piece(NamedTuple):
    """Some rows of a matrix in one format, in row blocks; the last block is padded with zero scales."""

    values: Tensor
    """Blocks x groups x bytes, uint8."""
    scales: Tensor
    """Blocks x groups x 8 rows, float16."""
    minimums: Tensor | None
    rows: int

    @property
    def bits(self) -> int:
        return self.values.shape[-1] // GROUP

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self[:3] if part is not None)

    def dequantize(self, blocks: Tensor | slice = slice(None)) -> Tensor:
        """The numbers of these row blocks as float32: blocks x 8 rows x columns."""
        quads = self.values[blocks].unflatten(-1, (-1, BLOCK_ROWS, 4)).permute(0, 3, 1, 2, 4).flatten(-2)
        if self.bits == 4:
            numbers = torch.cat((quads & 15, quads >> 4), dim=-1).float()
        else:
            numbers = quads.contiguous().view(torch.int8).float()
        numbers *= self.scales[blocks].float().transpose(1, 2)[..., None]
        if self.minimums is not None:
            numbers += self.minimums[blocks].float().transpose(1, 2)[..., None]
        return numbers.flatten(2)

    def take(self, rows: Sequence[int]) -> Tensor:
        """These rows as float32. In numpy: every decode step needs one, for which torch takes 0.3 ms and this 0.02."""
        groups = self.values.shape[1]
        values = self.values.numpy().reshape(-1, groups, self.bits, BLOCK_ROWS, 4)
        scales, minimums = self.scales.numpy(), None if self.minimums is None else self.minimums.numpy()
        taken = np.empty((len(rows), groups, GROUP), np.float32)
        for numbers, row in zip(taken, rows, strict=True):
            block, at = divmod(row, BLOCK_ROWS)
            stored = values[block, :, :, at].reshape(groups, -1)
            if self.bits == 4:
                numbers[:, : GROUP // 2], numbers[:, GROUP // 2 :] = stored & 15, stored >> 4
            else:
                numbers[:] = stored.view(np.int8)
            numbers *= scales[block, :, at].astype(np.float32)[:, None]
            if minimums is not None:
                numbers += minimums[block, :, at].astype(np.float32)[:, None]
        return torch.from_numpy(taken.reshape(len(rows), -1))


@dataclass
class QuantizedMatrix:
    columns: int
    pieces: dict[int, Piece] = field(default_factory=dict)
    """By the number of their first row."""

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces.values())

    def table(self, num_rows: int | None = None) -> Any:
        """The pieces as native/engine reads them: bits, addresses and rows of each. With `num_rows`, only the first of
        a matrix of one piece."""
        return np.array(
            [
                [piece.bits, *(0 if part is None else part.data_ptr() for part in piece[:3]), num_rows or piece.rows]
                for _, piece in sorted(self.pieces.items())
            ],
            np.int64,
        )

    def tensors(self) -> list[Tensor]:
        return [part for piece in self.pieces.values() for part in piece[:3] if part is not None]

    def dequantize(self) -> Tensor:
        """The numbers as float32."""
        pieces = [piece for _, piece in sorted(self.pieces.items())]
        return torch.cat([piece.dequantize().flatten(0, 1)[: piece.rows] for piece in pieces])

    def take(self, rows: Sequence[int]) -> Tensor:
        """These rows of a matrix of one piece, as float32."""
        (piece,) = self.pieces.values()
        return piece.take(rows)


def quantize(matrix: Tensor, bits: int) -> Piece:
    grouped = matrix.float().unflatten(1, (-1, GROUP))
    if bits == 8:
        scales = grouped.abs().amax(dim=-1) / 127
        return _packed(_rounded(grouped, scales).to(torch.int8).view(torch.uint8), scales, None)
    lowest, highest = grouped.aminmax(dim=-1)
    scales = (highest - lowest) / 15
    halves = _rounded(grouped - lowest[..., None], scales).clamp(0, 15).to(torch.uint8)
    return _packed(_joined(halves), scales, lowest)


def pack(numbers: GroupedIntegers) -> Piece:
    """The integers of a stored tensor."""
    values = torch.from_numpy(numbers.values.view(np.uint8))
    minimums = None if numbers.minimums is None else torch.from_numpy(numbers.minimums)
    return _packed(_joined(values) if numbers.bits == 4 else values, torch.from_numpy(numbers.scales), minimums)


def _rounded(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers / scales.clamp_min(1e-30)[..., None]).round()


def _joined(halves: Tensor) -> Tensor:
    return halves[..., : GROUP // 2] | (halves[..., GROUP // 2 :] << 4)


def _packed(numbers: Tensor, scales: Tensor, minimums: Tensor | None) -> Piece:
    """From rows x groups x bytes to blocks x groups x quads x rows of the block x 4 bytes."""
    rows = len(numbers)
    quads = _in_blocks(numbers).unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4)
    halves = [None if part is None else _in_blocks(part.half()).transpose(1, 2) for part in (scales, minimums)]
    own_scales, own_minimums = (None if part is None else place(part.contiguous()) for part in halves)
    assert own_scales is not None
    return Piece(place(quads.flatten(2).contiguous()), own_scales, own_minimums, rows)


def _in_blocks(part: Tensor) -> Tensor:
    missing = -len(part) % BLOCK_ROWS
    padding = part.new_zeros((missing, *part.shape[1:]))
    return torch.cat((part, padding)).unflatten(0, (-1, BLOCK_ROWS))


def linear(x: Tensor, weight: Tensor | QuantizedMatrix, num_rows: int | None = None) -> Tensor:
    """x @ weight.T for tokens N W; a plain weight is torch's. With `num_rows`, only the first rows."""
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight)
    return _product(x, weight.table(num_rows), num_rows or weight.rows)


def _product(x: Tensor, table: Any, rows: int) -> Tensor:
    library = open_library()
    assert library is not None, "quantized matrices exist only with the library"
    x, y = x.contiguous(), torch.empty((len(x), rows))
    addresses = x.data_ptr(), len(x), y.data_ptr()
    status = library.lakh_engine_matmul(table.ctypes.data, len(table), x.shape[1], *addresses)
    assert status == 0, f"{table[:, 0]} bits, {x.shape[1]} columns"
    return y


def use_threads(count: int) -> None:
    """Threads of later products, including the caller's."""
    library = open_library()
    assert library is not None
    library.lakh_engine_set_threads(count)
