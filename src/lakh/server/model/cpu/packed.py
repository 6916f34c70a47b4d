"""Weights of 32, 8 or 4 bits a number in the layout of native/engine, and their products.

The kernels (NEON dot product, AVX2, AVX-VNNI, AVX-512 VNNI, AMX, portable; chosen at run time) read a matrix once for
all tokens of a step. Without that library (native.py) float32 is torch's, and quantized weights are refused.

8 bits are the numbers of GGUF's Q8_0, or have a minimum beside the scale; 4 bits have one, as Q4_1 has. A matrix
consists of pieces, some of its rows in one format: q, k and v of a fused matrix may differ, as they do in GGUF files.
A matrix of each expert of a layer is one PackedMatrix, whose products read only the experts that have tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lakh.server.model.cpu.large_pages import place
from lakh.server.model.cpu.native import EngineExperts, EngineMatrices, open_library
from lakh.workloads.code.formats.gguf_types import GroupedIntegers

__all__ = ["GROUP", "PackedMatrix", "Piece", "linear", "pack", "pack_integers", "run_experts", "use_threads"]

GROUP = 32  # numbers that share a scale
BLOCK_ROWS = 8  # rows that are stored together
PANEL_ROWS = 32  # in float32


class Piece(NamedTuple):
    """Some rows of a matrix in one format, in row blocks (float32: panels); the last one is padded with zeros."""

    values: Tensor
    """Blocks x groups x bytes, uint8; or panels x columns x 32 rows, float32."""
    scales: Tensor | None
    """Blocks x groups x 8 rows, float16; None: float32."""
    minimums: Tensor | None
    rows: int
    """Of each expert."""
    experts: int = 1
    """Whose blocks are stored one after the other."""

    @property
    def bits(self) -> int:
        return 32 if self.scales is None else self.values.shape[-1] // GROUP

    @property
    def tensors(self) -> list[Tensor]:
        return [part for part in self[:3] if part is not None]

    def dequantize(self) -> Tensor:
        """The numbers as float32: experts x rows x columns."""
        if self.scales is None:
            numbers = self.values.transpose(1, 2)
        else:
            quads = self.values.unflatten(-1, (-1, BLOCK_ROWS, 4)).permute(0, 3, 1, 2, 4).flatten(-2)
            if self.bits == 4:
                numbers = torch.cat((quads & 15, quads >> 4), dim=-1).float()
            else:
                numbers = quads.contiguous().view(torch.int8).float()
            numbers *= self.scales.float().transpose(1, 2)[..., None]
            if self.minimums is not None:
                numbers += self.minimums.float().transpose(1, 2)[..., None]
            numbers = numbers.flatten(2)
        return numbers.unflatten(0, (self.experts, -1)).flatten(1, 2)[:, : self.rows]

    def take(self, rows: Sequence[int]) -> Tensor:
        """These rows as float32. In numpy: every decode step needs one, for which torch takes 0.3 ms and this 0.02."""
        if self.scales is None:
            panels, places = np.divmod(np.array(rows, np.int64), PANEL_ROWS)
            return torch.from_numpy(self.values.numpy()[panels, :, places])
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
class PackedMatrix:
    columns: int
    pieces: dict[int, Piece] = field(default_factory=dict)
    """By the number of their first row; `put` changes them."""
    _table: Any = None
    """Made once: it costs as much as a product with a small matrix."""

    def put(self, first_row: int, piece: Piece) -> None:
        self.pieces[first_row] = piece
        self._table = None

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces.values())

    @property
    def experts(self) -> int:
        """Matrices of this shape, one after the other."""
        return next(iter(self.pieces.values())).experts

    def table(self, num_rows: int | None = None) -> Any:
        """The pieces as native/engine reads them: bits, addresses and rows of each. With `num_rows`, only the first of
        a matrix of one piece."""
        if self._table is None:
            rows = [
                [piece.bits, *(0 if part is None else part.data_ptr() for part in piece[:3]), piece.rows]
                for _, piece in sorted(self.pieces.items())
            ]
            self._table = np.array(rows, np.int64)
        if num_rows is None:
            return self._table
        table = self._table.copy()
        table[:, -1] = num_rows
        return table

    def tensors(self) -> list[Tensor]:
        return [part for piece in self.pieces.values() for part in piece.tensors]

    def dequantize(self) -> Tensor:
        """The numbers as float32: rows x columns, or experts x rows x columns."""
        pieces = [piece for _, piece in sorted(self.pieces.items())]
        numbers = torch.cat([piece.dequantize() for piece in pieces], dim=1)
        return numbers if pieces[0].experts > 1 else numbers[0]

    def take(self, rows: Sequence[int]) -> Tensor:
        """These rows of a matrix of one piece, as float32."""
        (piece,) = self.pieces.values()
        return piece.take(rows)


def pack(matrix: Tensor, bits: int) -> Piece:
    """A matrix, or those of several experts, rounded to 8 or 4 bits or as float32."""
    experts = matrix[None] if matrix.dim() == 2 else matrix
    return _placed([_of_one(expert, bits) for expert in experts])


def _of_one(matrix: Tensor, bits: int) -> Piece:
    if bits == 32:
        panels = _in_blocks(matrix.float(), PANEL_ROWS).transpose(1, 2)
        return Piece(panels.contiguous(), None, None, len(matrix))
    grouped = matrix.float().unflatten(1, (-1, GROUP))
    if bits == 8:
        scales = grouped.abs().amax(dim=-1) / 127
        return _packed(_rounded(grouped, scales).to(torch.int8).view(torch.uint8), scales, None)
    lowest, highest = grouped.aminmax(dim=-1)
    scales = (highest - lowest) / 15
    halves = _rounded(grouped - lowest[..., None], scales).clamp(0, 15).to(torch.uint8)
    return _packed(_joined(halves), scales, lowest)


def pack_integers(numbers: GroupedIntegers, experts: int = 1) -> Piece:
    """The integers of a stored tensor, whose rows are those of all experts."""
    values = torch.from_numpy(numbers.values.view(np.uint8)).unflatten(0, (experts, -1))
    values = _joined(values) if numbers.bits == 4 else values
    scales, minimums = (
        [None] * experts if part is None else torch.from_numpy(part).unflatten(0, (experts, -1))
        for part in (numbers.scales, numbers.minimums)
    )
    return _placed([_packed(*parts) for parts in zip(values, scales, minimums, strict=True)])


def _placed(experts: list[Piece]) -> Piece:
    def joined(parts: list[Tensor]) -> Tensor:
        return place(torch.cat(parts) if len(parts) > 1 else parts[0])

    scales, minimums = ([part for part in parts if part is not None] for parts in list(zip(*experts, strict=True))[1:3])
    return Piece(
        joined([piece.values for piece in experts]),
        joined(scales) if scales else None,
        joined(minimums) if minimums else None,
        experts[0].rows,
        len(experts),
    )


def _rounded(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers / scales.clamp_min(1e-30)[..., None]).round()


def _joined(halves: Tensor) -> Tensor:
    return halves[..., : GROUP // 2] | (halves[..., GROUP // 2 :] << 4)


def _packed(numbers: Tensor, scales: Tensor, minimums: Tensor | None) -> Piece:
    """From rows x groups x bytes to blocks x groups x quads x rows of the block x 4 bytes."""
    rows = len(numbers)
    quads = _in_blocks(numbers).unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4)
    halves = [None if part is None else _in_blocks(part.half()).transpose(1, 2) for part in (scales, minimums)]
    own_scales, own_minimums = (None if part is None else part.contiguous() for part in halves)
    return Piece(quads.flatten(2).contiguous(), own_scales, own_minimums, rows)


def _in_blocks(part: Tensor, rows: int = BLOCK_ROWS) -> Tensor:
    padding = part.new_zeros((-len(part) % rows, *part.shape[1:]))
    return torch.cat((part, padding)).unflatten(0, (-1, rows))


def linear(x: Tensor, weight: Tensor | PackedMatrix, num_rows: int | None = None) -> Tensor:
    """x @ weight.T for tokens N W; a plain weight is torch's. With `num_rows`, only the first rows."""
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight)
    return _product(x, weight.table(num_rows), num_rows or weight.rows)


def _product(x: Tensor, table: Any, rows: int) -> Tensor:
    library = open_library()
    assert library is not None, "packed matrices exist only with the library"
    x, y = x.contiguous(), torch.empty((len(x), rows))
    addresses = x.data_ptr(), len(x), y.data_ptr()
    status = library.lakh_engine_matmul(table.ctypes.data, len(table), x.shape[1], *addresses)
    assert status == 0, f"{table[:, 0]} bits, {x.shape[1]} columns"
    return y


def run_experts(
    x_NW: Tensor,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    index_NK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """workloads/code/ops.py's: the weighted sum over each token's K experts, of which the chosen ones are read."""
    library = open_library()
    assert library is not None, "packed matrices exist only with the library"
    tables = gate_up.table(), down.table()
    matrices = (EngineMatrices(table.ctypes.data, len(table)) for table in tables)
    bias_address = None if bias is None else bias.data_ptr()
    experts = EngineExperts(down.experts, gate_up.columns, down.columns, *matrices, bias_address)
    x_NW, index_NK, weight_NK = x_NW.contiguous(), index_NK.contiguous(), weight_NK.float().contiguous()
    y_NW = torch.empty_like(x_NW)
    addresses = index_NK.data_ptr(), weight_NK.data_ptr(), y_NW.data_ptr()
    status = library.lakh_engine_run_experts(experts, x_NW.data_ptr(), *index_NK.shape, *addresses)
    assert status == 0, f"{down.experts} experts, {gate_up.columns} and {down.columns} columns"
    return y_NW


def use_threads(count: int) -> None:
    """Threads of later products, including the caller's."""
    library = open_library()
    assert library is not None
    library.lakh_engine_set_threads(count)
