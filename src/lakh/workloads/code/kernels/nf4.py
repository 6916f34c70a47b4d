"""Frozen matrices in 4 bits: NormalFloat numbers in groups of 64 with one scale each (QLoRA, arXiv 2305.14314).

4.25 bits a weight. The 16 levels are quantiles of a normal distribution, which weights follow closely; a group is
scaled by its largest absolute value.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUP", "dequantize", "quantize"]

GROUP = 64
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""From the paper's appendix E."""


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights in a byte (O x I/2), the first in the low half, and bf16 scales (O x I/GROUP)."""
    groups = weight_OI.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(dim=-1).clamp_min(1e-12).to(torch.bfloat16)
    levels = torch.tensor(LEVELS, device=weight_OI.device)
    middles = (levels[1:] + levels[:-1]) / 2
    numbers = torch.bucketize(groups / scales.float()[..., None], middles).to(torch.uint8).flatten(-2)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, scales


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    levels = torch.tensor(LEVELS, device=packed.device, dtype=dtype)
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()
    return (levels[numbers].unflatten(-1, (-1, GROUP)) * scales.to(dtype)[..., None]).flatten(-2)
