"""Encodings of one slice of a tensor in an incremental checkpoint, relative to the same slice of its base.

    exact      bit-exact: differences to the base, or to what rows, columns and the base predict (exact.py)
    delta5     difference to the base on 41 levels, in blocks of 128 with one bf16 scale each, about 5 bits: weights
    value5     values on 31 levels in the same blocks: first moments
    log        logarithms in steps of 1/4 octave, relative to means of rows and columns, about 4 bits: second moments
    factored   means of rows and columns: second moments at almost no bytes
    delta4, value4, root8    15 levels, 15 levels, and square roots on 256 levels, rounded up so that none becomes zero

An encoded slice is bytes: a length, a JSON header, and compressed parts. Decoding needs only the bytes and the base.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lakh.checkpoint.encoding.bounded import BLOCK, BLOCK_BOUNDS, decode_bounded, encode_bounded
from lakh.checkpoint.encoding.exact import decode_exact, encode_exact
from lakh.checkpoint.encoding.parts import unpack

__all__ = ["BLOCK", "BLOCK_BOUNDS", "EncodedSlice", "decode", "encode"]


@dataclass(frozen=True)
class EncodedSlice:
    data: np.ndarray
    """uint8."""
    decoded: Tensor
    """What a reader will get."""


def encode(kind: str, tensor: Tensor, base: Tensor | None) -> EncodedSlice:
    """Encode a slice in host memory. Kinds other than exact fall back to it for tensors that they cannot represent."""
    tensor = tensor.detach().contiguous()
    if kind != "exact" and tensor.dtype.is_floating_point and tensor.numel():
        values = tensor.float().numpy()
        if np.isfinite(values).all() and not (kind.startswith("delta") and base is None):
            data, found = encode_bounded(kind, values, base)
            return EncodedSlice(data, torch.from_numpy(found).reshape(tensor.shape).to(tensor.dtype))
    return EncodedSlice(encode_exact(tensor, base), tensor)


def decode(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], base: Tensor | None) -> Tensor:
    """The slice. Raises ValueError if the bytes do not describe it."""
    try:
        header, parts = unpack(data)
        if header["kind"] == "exact":
            return decode_exact(header, parts, dtype, shape, base)
        return torch.from_numpy(decode_bounded(header, parts, shape, base)).reshape(shape).to(dtype)
    except (KeyError, TypeError, IndexError, OSError, AttributeError) as error:
        raise ValueError(f"is not an encoded slice ({error!r})") from None
