"""8-bit floats and integers of a Hugging Face file, with a scale for a whole matrix, for each row or for each block.

    NAME                         float8_e4m3fn or int8  ... x outputs x inputs
    NAME_scale_inv, NAME_scale   a number; or ... x outputs x 1; or one for each block of rows and columns
    NAME_zero_point              int8, of the same shape; optional

The first name of scales is that of quant_method fp8 (DeepSeek-V3, MiniMax-M2, Devstral 2), the second that of
compressed-tensors. A weight is (number - zero) * scale, in bfloat16. Scales of activations and of cached keys and
values are left out: lakh chooses the precision of products and of its cache when it serves.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from lakh.errors import CorruptCheckpoint

__all__ = ["METHODS", "block_size_of", "dequantize", "unpack"]

METHODS = ("fp8", "compressed-tensors")
SCALES = ("_scale_inv", "_scale")
ZERO = "_zero_point"
ACTIVATIONS = re.compile(r".*\.(activation_scale|input_scale|input_zero_point|self_attn\.[qkv]_(scale|zero_point))")
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def block_size_of(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the config does not say, as with other scales than those of blocks."""
    if not isinstance(quantization, dict):
        return None
    sizes = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        sizes.append(weights.get("block_structure") if isinstance(weights, dict) else None)
    for size in sizes:
        if isinstance(size, list) and len(size) == 2 and all(type(number) is int and number > 0 for number in size):
            return size[0], size[1]
    return None


def dequantize(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None, zero: Tensor | None = None
) -> Tensor:
    """`... outputs inputs` in bfloat16. A ValueError for a scale that does not fit."""
    values, factors = weight.float(), scale.float()
    if zero is not None:
        if zero.shape != scale.shape or zero.numel() not in (1, len(weight)):
            raise ValueError
        values = values - zero.float()
    if factors.numel() == 1:
        return (values * factors.reshape(())).bfloat16()
    if factors.dim() != values.dim() or factors.shape[:-2] != values.shape[:-2]:
        raise ValueError
    for dim in (-2, -1):
        size, count = values.shape[dim], factors.shape[dim]
        if count == size or (count == 1 and block is None):
            continue
        length = -(-size // count) if block is None else block[dim]
        if -(-size // length) != count or (block is None and size % count):
            raise ValueError
        factors = factors.repeat_interleave(length, dim).narrow(dim, 0, size)
    return (values * factors).bfloat16()


def unpack(where: str, tensors: dict[str, Tensor], block: tuple[int, int] | None) -> None:
    """Replace weights and their scales by values, one after the other, so that a model is not in memory twice."""
    for name in [name for name in tensors if ACTIVATIONS.fullmatch(name)]:
        del tensors[name]
    for name in [name for name, tensor in tensors.items() if tensor.dtype in EIGHT_BITS and not name.endswith(ZERO)]:
        weight, zero = tensors[name], tensors.pop(name + ZERO, None)
        scale = next((tensors.pop(name + ending) for ending in SCALES if name + ending in tensors), None)
        if scale is None:
            raise CorruptCheckpoint(where, f"has 8-bit weights {name} without a scale", "copy the model again")
        try:
            tensors[name] = dequantize(weight, scale, block, zero)
        except ValueError:
            shapes = f"{list(weight.shape)} and scales {list(scale.shape)}"
            raise CorruptCheckpoint(where, f"{name} has shape {shapes}", "copy the model again") from None
