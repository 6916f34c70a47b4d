"""Types of values on the network. `int8` has one scale for each part of a row: its largest absolute value / 127.

Each rank also encodes what it sends to itself, so that all ranks compute with the same values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lakh.compiled import compiled
from lakh.spec.embedding import CommDtype

__all__ = ["decode", "encode", "row_bytes"]

HALF = {"bf16": torch.bfloat16, "f16": torch.float16}


def row_bytes(dtype: CommDtype, widths: np.ndarray) -> int:
    """Bytes of one row with parts of these widths."""
    columns = int(widths.sum())
    return {"f32": 4 * columns, "bf16": 2 * columns, "f16": 2 * columns, "int8": columns + 4 * len(widths)}[dtype]


def encode(dtype: CommDtype, values_MC: Tensor, widths: np.ndarray) -> Tensor:
    """The bytes of each row, uint8."""
    if dtype == "f32":
        return values_MC.contiguous().view(torch.uint8)
    if dtype == "int8" and values_MC.device.type != "cpu":
        return encode_on_device(values_MC, widths)
    if dtype == "int8":
        out = torch.empty(len(values_MC), row_bytes(dtype, widths), dtype=torch.uint8)
        columns = int(widths.sum())
        scales = np.empty((len(values_MC), len(widths)), np.float32)
        _to_int8(values_MC.contiguous().numpy(), widths, out.numpy()[:, :columns], scales)
        out[:, columns:] = torch.from_numpy(scales).view(torch.uint8)
        return out
    return values_MC.to(HALF[dtype]).contiguous().view(torch.uint8)


def decode(dtype: CommDtype, coded: Tensor, widths: np.ndarray) -> Tensor:
    """The rows as f32."""
    if dtype == "f32":
        return coded.view(torch.float32)
    if dtype == "int8" and coded.device.type != "cpu":
        return decode_on_device(coded, widths)
    if dtype == "int8":
        columns = int(widths.sum())
        out = torch.empty(len(coded), columns)
        scales = coded[:, columns:].contiguous().view(torch.float32)
        _from_int8(coded.numpy()[:, :columns], widths, scales.numpy(), out.numpy())
        return out
    return coded.view(HALF[dtype]).float()


def encode_on_device(values_MC: Tensor, widths: np.ndarray) -> Tensor:
    """The int8 of `encode`, by torch."""
    levels, scales = [], []
    for part in values_MC.split(widths.tolist(), dim=1):
        scale = part.abs().amax(1, keepdim=True) / 127
        level = torch.where(scale > 0, part / scale, 0.0).round()
        levels.append((level + 128).to(torch.uint8))
        scales.append(scale)
    return torch.cat([*levels, torch.cat(scales, dim=1).view(torch.uint8)], dim=1)


def decode_on_device(coded: Tensor, widths: np.ndarray) -> Tensor:
    columns = int(widths.sum())
    scales = coded[:, columns:].contiguous().view(torch.float32)
    parts = coded[:, :columns].float().sub(128).split(widths.tolist(), dim=1)
    return torch.cat([part * scales[:, at : at + 1] for at, part in enumerate(parts)], dim=1)


@compiled
def _to_int8(values_MC, widths_P, out_MC, scales_MP):
    for m in range(len(values_MC)):
        first = 0
        for p in range(len(widths_P)):
            largest = np.float32(0)
            for c in range(first, first + widths_P[p]):
                largest = max(largest, abs(values_MC[m, c]))
            scale = largest / np.float32(127)
            scales_MP[m, p] = scale
            for c in range(first, first + widths_P[p]):
                level = np.rint(values_MC[m, c] / scale) if scale > 0 else np.float32(0)
                out_MC[m, c] = np.uint8(np.int32(level) + 128)
            first += widths_P[p]


@compiled
def _from_int8(coded_MC, widths_P, scales_MP, out_MC):
    for m in range(len(coded_MC)):
        first = 0
        for p in range(len(widths_P)):
            for c in range(first, first + widths_P[p]):
                out_MC[m, c] = np.float32(np.int32(coded_MC[m, c]) - 128) * scales_MP[m, p]
            first += widths_P[p]
