"""Weights of 8 and 4 bits on the GPU, and products of any number of tokens with them.

fp8: e4m3 numbers with a float32 scale for each row. Tokens are rounded to e4m3 too, each with a scale of its own, and
multiplied by cuBLAS (W8A8); a single sequence uses the megakernel, whose tokens are sums of three numbers of e5m2.

int4: groups of 32 numbers n with a float16 scale, for scale * (n - 8). Tokens stay in bf16 (W4A16). A row holds its
numbers, then its scales, padded to 16 bytes; the order inside 32 bits is the megakernel's (3_matmul.cu). Few tokens are
multiplied by a Triton kernel that reads the weights as they are; for many, the matrix is dequantized first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BITS", "Fp8Matrix", "Int4Matrix", "as_matrix", "dequantize", "empty", "linear", "quantize", "row_bytes"]

BITS = {"fp8": 8, "int4": 4}
FP8_MAX = 448.0
GROUP = 32
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Of eight numbers in 32 bits."""
MAX_KERNEL_TOKENS = 128  # with more tokens dequantizing a matrix costs less than its product
READ_BEYOND = 128
"""Zeros behind the last row: the megakernel reads rows in groups of 128 bytes."""
SCALE_STEPS = 12  # scales that are tried for a group of int4


class Fp8Matrix(NamedTuple):
    values: Tensor
    """Rows x columns, e4m3."""
    scales: Tensor
    """Of rows, float32."""


class Int4Matrix(NamedTuple):
    values: Tensor
    """Rows x row_bytes, uint8."""
    columns: int


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row; of 4 bits with its scales."""
    scales = -(-columns // GROUP * 2 // 16) * 16 if bits == 4 else 0
    return columns * bits // 8 + scales


def quantize(matrix: Tensor, bits: int) -> tuple[Tensor, ...]:
    """The tensors of a Fp8Matrix or an Int4Matrix, rows first."""
    return _to_fp8(matrix.float()) if bits == 8 else (_to_int4(matrix.float()),)


def empty(layers: int, rows: int, columns: int, bits: int, device: torch.device) -> tuple[Tensor, ...]:
    """Room for the matrices of all layers."""
    size = layers * rows * row_bytes(columns, bits)
    memory = torch.empty(size + READ_BEYOND, dtype=torch.uint8, device=device)
    memory[size:] = 0
    values = memory[:size].view(layers, rows, -1)
    if bits == 4:
        return (values,)
    return values.view(torch.float8_e4m3fn), torch.empty((layers, rows), device=device)


def _to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    scales = matrix.abs().amax(dim=1).clamp_min(1e-12) / FP8_MAX
    return (matrix / scales[:, None]).to(torch.float8_e4m3fn), scales


def _to_int4(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    groups = matrix.unflatten(1, (-1, GROUP))
    # The number of the largest magnitude becomes -8, which has no positive counterpart, or a little less; of several
    # scales the one with the least squared error.
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = torch.full_like(extreme, torch.inf)
    scales, numbers = torch.zeros_like(extreme), torch.zeros_like(groups)
    for step in range(SCALE_STEPS):
        scale = (extreme / -(6.5 + 2.0 * step / (SCALE_STEPS - 1))).half().float()
        rounded = (groups / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
        error = (rounded * scale - groups).square().sum(-1, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales, numbers = torch.where(is_better, scale, scales), torch.where(is_better, rounded, numbers)
    eights = (numbers.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, 8))
    words = (eights << torch.tensor(SHIFTS, device=matrix.device)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    packed = torch.zeros((rows, row_bytes(columns, 4)), dtype=torch.uint8, device=matrix.device)
    packed[:, : columns // 2] = words.view(torch.uint8)
    packed[:, columns // 2 : columns // 2 + columns // GROUP * 2] = scales[..., 0].half().view(torch.uint8)
    return packed


def dequantize(weight: Fp8Matrix | Int4Matrix, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Fp8Matrix):
        return (weight.values.float() * weight.scales[:, None]).to(dtype)
    packed, columns = weight
    if packed.is_cuda:
        from lakh.server.model.gpu import quantized_kernels  # needs Triton

        return quantized_kernels.dequantize_int4(packed, columns, dtype)
    words = packed[:, : columns // 2].contiguous().view(torch.int32)
    numbers = words[..., None] >> torch.tensor(SHIFTS, dtype=torch.int32) & 15
    scales = packed[:, columns // 2 : columns // 2 + columns // GROUP * 2].contiguous().view(torch.float16)
    grouped = (numbers - 8).flatten(1).unflatten(1, (-1, GROUP)).to(dtype)
    return (grouped * scales[..., None].to(dtype)).flatten(1)


def as_matrix(parts: tuple[Tensor, ...], columns: int) -> Fp8Matrix | Int4Matrix:
    """The tensors of one matrix."""
    return Fp8Matrix(*parts) if len(parts) == 2 else Int4Matrix(parts[0], columns)


def linear(x_NK: Tensor, weight: Tensor | Fp8Matrix | Int4Matrix) -> Tensor:
    """x @ weight.T in the type of x."""
    if isinstance(weight, Tensor):
        return F.linear(x_NK, weight)
    from lakh.server.model.gpu import quantized_kernels  # needs Triton

    if isinstance(weight, Int4Matrix):
        if len(x_NK) <= MAX_KERNEL_TOKENS:
            return quantized_kernels.multiply_int4(x_NK.contiguous(), weight.values, weight.columns)
        return F.linear(x_NK, dequantize(weight, x_NK.dtype))
    rounded, scales = quantized_kernels.round_tokens(x_NK.contiguous())
    return torch._scaled_mm(
        rounded, weight.values.t(), scale_a=scales[:, None], scale_b=weight.scales[None], out_dtype=x_NK.dtype
    )
