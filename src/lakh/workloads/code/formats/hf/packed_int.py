"""Weights in 4- or 8-bit integers of a Hugging Face file, several in an int32, with a scale for each group of inputs.

    AWQ                  qweight   inputs x outputs/8 (the numbers of an int32 in the order 0 2 4 6 1 3 5 7)
                         qzeros    groups x outputs/8, likewise; scales  groups x outputs
    GPTQ                 qweight   inputs/8 x outputs; qzeros  groups x outputs/8, whose words are less by 1 in every
                         number in its first version
                         scales    groups x outputs; g_idx  the group of each input
    compressed-tensors   weight_packed  outputs x inputs/8, plus 8; weight_scale  outputs x groups, or one for all
                         weight_zero_point  outputs/8 x groups, or one for all; weight_g_idx; weight_shape

The first number of an int32 is in its lowest bits; with 8 bits it holds four. A weight is (number - zero) * scale, here
`outputs x inputs` in the type of the scales. Words are signed, so shifted bits are masked.

The layouts are those that AutoAWQ 0.2.9, GPTQModel 7.7.0 and compressed-tensors 0.20.0 write. A file of
compressed-tensors may have matrices of several kinds, which the sizes of their tensors tell apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lakh.errors import CorruptCheckpoint, UserError

__all__ = ["METHODS", "unpack"]

METHODS = ("awq", "gptq", "compressed-tensors")
WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the numbers of an int32 are."""


def _numbers(words: Tensor, bits: int, dim: int) -> Tensor:
    """The unsigned numbers in int32 words, side by side along `dim`."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    parts = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return parts.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _settings_of(where: str, method: str, quantization: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each kind of matrices: bits of a number and inputs of a group; 0 for all inputs, or where the config does not
    say."""
    groups = quantization.get("config_groups")
    stated: list[tuple[Any, Any]] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("type", "int") == "int":
            stated.append((weights.get("num_bits"), weights.get("group_size")))
    known = (4,) if method == "awq" else (4, 8)
    found = []
    for bits, size in stated or [(quantization.get("bits"), quantization.get("group_size"))]:
        if bits not in known or isinstance(bits, bool):
            todo = f"give a model in {' or '.join(map(str, known))} bits, or not quantized"
            raise UserError(f"quantization_config ({where})", f"weights have {bits!r} bits", todo)
        found.append((int(bits), size if type(size) is int and size > 0 else 0))
    return found


def _group_size(inputs: int, groups: int, stated: int) -> int:
    size = inputs // groups
    if size * groups != inputs or (stated and size != stated):
        raise ValueError
    return size


def _awq(parts: dict[str, Tensor], stated: int) -> Tensor:
    def ordered(words: Tensor) -> Tensor:
        return _numbers(words, 4, 1).unflatten(1, (-1, len(AWQ_ORDER)))[:, :, AWQ_ORDER].flatten(1)

    scales, numbers = parts["scales"], ordered(parts["qweight"])
    size = _group_size(len(numbers), len(scales), stated)
    zeros = ordered(parts["qzeros"]).repeat_interleave(size, 0)
    return ((numbers - zeros) * scales.float().repeat_interleave(size, 0)).T


def _gptq(parts: dict[str, Tensor], bits: int, stated: int, offset: int) -> Tensor:
    scales, numbers = parts["scales"], _numbers(parts["qweight"], bits, 0)
    size = _group_size(len(numbers), len(scales), stated)
    group = parts.get("g_idx", torch.arange(len(numbers)) // size).long()
    ones = offset * sum(1 << at for at in range(0, WORD_BITS, bits))
    zeros = _numbers(parts["qzeros"].long() + ones, bits, 1)  # of whole words: a zero of 0 has borrowed from the next
    return ((numbers - zeros[group]) * scales.float()[group]).T


def _compressed(parts: dict[str, Tensor], settings: list[tuple[int, int]]) -> Tensor:
    rows, columns = parts["weight_shape"].tolist()
    if len(parts["weight_packed"]) != rows:
        raise ValueError
    words, scales = parts["weight_packed"].shape[1], parts["weight_scale"].float()
    scales = scales.expand(rows, 1) if scales.dim() == 1 else scales
    fitting = [
        (bits, stated)
        for bits, stated in settings
        if words == -(-columns * bits // WORD_BITS) and stated in (0, columns // scales.shape[1])
    ]
    bits, stated = fitting[0]
    numbers = _numbers(parts["weight_packed"], bits, 1)[:rows, :columns]
    size = _group_size(columns, scales.shape[1], stated)
    group = parts.get("weight_g_idx")
    if group is None or group.min() < 0:  # -1: the inputs keep their order
        group = torch.arange(columns) // size
    group = group.long()
    zeros = parts.get("weight_zero_point", torch.zeros(1, dtype=torch.int8))
    if zeros.dim() == 1:  # of all rows, and not packed
        zeros = (zeros.int() + (1 << (bits - 1))).expand(scales.shape)
    else:
        zeros = _numbers(zeros, bits, 0)[:rows]
    return (numbers - zeros[:, group]) * scales[:, group]


_TENSORS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
}
"""Of a matrix: first the numbers."""
_OPTIONAL = ("g_idx", "weight_zero_point", "weight_g_idx")


def unpack(where: str, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Replace the tensors of packed matrices by their values, one after the other."""
    method = str(quantization.get("quant_method"))
    names = _TENSORS[method]
    stems = [name.removesuffix(names[0]) for name in tensors if name.rpartition(".")[2] == names[0]]
    if not stems:
        return
    settings = _settings_of(where, method, quantization)
    bits, stated = settings[0]
    if method == "awq" and str(quantization.get("version", "gemm")).lower() != "gemm":
        found = f"is {quantization['version']!r}, another order of numbers than gemm"
        raise UserError(f"quantization_config.version ({where})", found, "give a model of version gemm")
    # The first version of GPTQ's files, which says nothing, stores zeros less 1.
    offset = int(quantization.get("checkpoint_format", "gptq") != "gptq_v2")
    for stem in stems:
        parts = {name: tensors.pop(stem + name) for name in names if stem + name in tensors}
        missing = next((name for name in names if name not in parts and name not in _OPTIONAL), None)
        if missing is not None:
            raise CorruptCheckpoint(where, f"has {stem}{names[0]} and no {stem}{missing}", "copy the model again")
        scales = parts[names[1] if method == "compressed-tensors" else "scales"]
        try:
            if method == "awq":
                values = _awq(parts, stated)
            elif method == "gptq":
                values = _gptq(parts, bits, stated, offset)
            else:
                values = _compressed(parts, settings)
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
            raise CorruptCheckpoint(where, f"{stem}: {shapes} do not fit", "copy the model again") from None
        tensors[f"{stem}weight"] = values.to(scales.dtype).contiguous()
