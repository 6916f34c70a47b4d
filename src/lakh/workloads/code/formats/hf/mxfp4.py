"""MXFP4 weights of a Hugging Face file: groups of 32 4-bit floats with a power of two each (OCP MX specification 1.0).

    NAME_blocks   uint8  ... x groups x 16   two values in a byte, the low half first
    NAME_scales   uint8  ... x groups        exponent of the group, plus 127

Experts of GPT-OSS are stored so: rows are outputs, groups run along the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lakh.errors import CorruptCheckpoint

__all__ = ["dequantize", "unpack"]

BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`... G 16` and `... G` to `... 32 G`. Exact in bf16: 2 bits of mantissa times a power of two."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(values[pairs.int()], exponents).to(dtype).flatten(-2)


def unpack(where: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file with pairs of blocks and scales replaced by their values, `E inputs outputs` as in a file
    that is not quantized."""
    found = {}
    for name, tensor in weights.items():
        if not name.endswith((BLOCKS, SCALES)):
            found[name] = tensor
        elif name.endswith(BLOCKS):
            stem = name.removesuffix(BLOCKS)
            scales = weights.get(stem + SCALES)
            if scales is None or tensor.shape[:-1] != scales.shape or tensor.shape[-1] != 16:
                raise CorruptCheckpoint(where, f"{name} and its scales do not fit", "copy the model again")
            found[stem] = dequantize(tensor, scales).mT
    return found
