"""Encodings of one slice of a tensor in an incremental checkpoint, relative to the same slice of its base.

    exact      difference of ordered bit patterns, split into byte planes, zstd; or the planes of the values themselves
               where that is smaller (first moments forget their base within ten steps). Bit-exact.
    delta4     4-bit difference to the base, in blocks of 128 with one bf16 scale each: weights
    value4     4-bit values in the same blocks: first moments
    root8      8-bit square roots, rounded up so that no second moment becomes zero: second moments
    factored   means of rows and columns: second moments at almost no bytes

An encoded slice is bytes: a length, a JSON header, and compressed parts. Decoding needs only the bytes and the base.
zstd comes from pyarrow, which the trainer needs as it is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

__all__ = ["BLOCK", "BLOCK_BOUNDS", "EncodedSlice", "decode", "encode"]

BLOCK = 128
LEVELS_4 = 7
LEVELS_8 = 255
BLOCK_BOUNDS = {"delta4": 1 / (2 * LEVELS_4), "value4": 1 / (2 * LEVELS_4), "root8": 1 / LEVELS_8}
"""The largest error of a value, as a share of the largest magnitude of its block (of differences, values or roots);
the bf16 scale, rounded up, adds at most 1 % of it."""
SAMPLE = 1 << 16
ZSTD_LEVEL = 3
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


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
        if np.isfinite(values).all() and not (kind == "delta4" and base is None):
            return _encode_bounded(kind, tensor, values, base)
    return EncodedSlice(_encode_exact(tensor, base), tensor)


def decode(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], base: Tensor | None) -> Tensor:
    """The slice. Raises ValueError if the bytes do not describe it."""
    try:
        header, parts = _unpack(data)
        if header["kind"] == "exact":
            bits = _decode_exact(header, parts, math.prod(shape), dtype, base)
            return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(shape)
        return torch.from_numpy(_decode_bounded(header, parts, shape, base)).reshape(shape).to(dtype)
    except (KeyError, TypeError, IndexError, OSError, AttributeError) as error:
        raise ValueError(f"is not an encoded slice ({error!r})") from None


# --- exact --------------------------------------------------------------------------------------------------------


def _encode_exact(tensor: Tensor, base: Tensor | None) -> np.ndarray:
    bits, is_float = _bits_of(tensor), tensor.dtype.is_floating_point
    methods = {"self": lambda part: _rotate(bits[part], is_float)}
    if base is not None:
        base_bits = _bits_of(base.detach().contiguous())
        methods["base"] = lambda part: _difference(bits[part], base_bits[part], is_float)
    middle = max(0, len(bits) - SAMPLE) // 2
    sample = slice(middle, middle + SAMPLE)
    sizes = {name: sum(map(len, _planes(method(sample))[1])) for name, method in methods.items()}
    chosen = min(sizes, key=lambda name: sizes[name])
    stored, parts = _planes(methods[chosen](slice(None)))
    return _pack({"kind": "exact", "of": chosen, "stored": stored}, parts)


def _decode_exact(
    header: dict[str, Any], parts: list[memoryview], count: int, dtype: torch.dtype, base: Tensor | None
) -> np.ndarray:
    width = dtype.itemsize
    planes = np.empty((count, width), np.uint8)
    for at, (is_stored, part) in enumerate(zip(header["stored"], parts, strict=True)):
        planes[:, at] = np.frombuffer(part if is_stored else _decompress(part, count), np.uint8)
    numbers = planes.reshape(-1).view(_UNSIGNED[width])
    if header["of"] == "self":
        return _rotate_back(numbers, dtype.is_floating_point)
    if base is None:
        raise ValueError("is a difference, and its base is missing")
    return _add_difference(numbers, _bits_of(base.detach().contiguous()), dtype.is_floating_point)


def _bits_of(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy().view(_UNSIGNED[tensor.element_size()])


def _ordered(bits: np.ndarray, is_float: bool) -> np.ndarray:
    """Unsigned numbers in the order of the floating-point numbers that the bits stand for."""
    if not is_float:
        return bits
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _difference(bits: np.ndarray, base: np.ndarray, is_float: bool) -> np.ndarray:
    """Small in its high bytes if the values are close: the sign is in the lowest bit."""
    signed = (_ordered(bits, is_float) - _ordered(base, is_float)).view(_SIGNED[bits.itemsize])
    return ((signed << 1) ^ (signed >> (8 * bits.itemsize - 1))).view(bits.dtype)


def _add_difference(numbers: np.ndarray, base: np.ndarray, is_float: bool) -> np.ndarray:
    signed = (numbers >> 1) ^ (~(numbers & 1) + numbers.dtype.type(1))
    ordered = _ordered(base, is_float) + signed
    if not is_float:
        return ordered
    sign = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def _rotate(bits: np.ndarray, is_float: bool) -> np.ndarray:
    """The sign moves to the lowest bit, so that the highest byte is the exponent alone."""
    return (bits << 1) | (bits >> (8 * bits.itemsize - 1)) if is_float else bits


def _rotate_back(numbers: np.ndarray, is_float: bool) -> np.ndarray:
    return (numbers >> 1) | (numbers << (8 * numbers.itemsize - 1)) if is_float else numbers


def _planes(numbers: np.ndarray) -> tuple[list[bool], list[bytes]]:
    """The bytes of each significance, compressed unless that makes them larger (then stored)."""
    columns = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize)
    stored, parts = [], []
    for at in range(numbers.itemsize):
        plane = np.ascontiguousarray(columns[:, at])
        part = _compress(plane)
        stored.append(len(part) >= len(plane))
        parts.append(plane.tobytes() if stored[-1] else part)
    return stored, parts


# --- bounded ------------------------------------------------------------------------------------------------------


def _encode_bounded(kind: str, tensor: Tensor, values: np.ndarray, base: Tensor | None) -> EncodedSlice:
    if kind == "factored" and (values.ndim < 2 or min(values.shape[0], values.size // values.shape[0]) < 2):
        kind = "root8"
    if kind == "factored":
        rows = values.reshape(values.shape[0], -1)
        header: dict[str, Any] = {"kind": kind}
        parts = [rows.mean(1, dtype=np.float64).astype(np.float32), rows.mean(0, dtype=np.float64).astype(np.float32)]
    else:
        numbers = values.reshape(-1)
        if kind == "delta4" and base is not None:
            numbers = numbers - base.float().numpy().reshape(-1)
        elif kind == "root8":
            numbers = np.sqrt(numbers)
        levels = LEVELS_8 if kind == "root8" else LEVELS_4
        quantised, scales = _quantise(numbers, levels, round_up=kind == "root8")
        header, parts = {"kind": kind, "levels": levels}, [scales, quantised]
    data = _pack(header, [_compress(part) for part in parts])
    decoded = torch.from_numpy(_decode_bounded(header, parts, values.shape, base)).reshape(tensor.shape)
    return EncodedSlice(data, decoded.to(tensor.dtype))


def _decode_bounded(
    header: dict[str, Any], parts: list[Any], shape: tuple[int, ...], base: Tensor | None
) -> np.ndarray:
    """The values in float32; `parts` are arrays, or compressed bytes."""
    count, kind = math.prod(shape), header["kind"]
    if kind == "factored":
        columns = count // shape[0]
        row, column = (_numbers(part, size, np.float32) for part, size in zip(parts, (shape[0], columns), strict=True))
        mean = float(row.mean(dtype=np.float64))
        return (np.outer(row, column) / mean if mean else np.zeros((shape[0], columns))).astype(np.float32)
    blocks = -(-count // BLOCK)
    scales = (_numbers(parts[0], blocks, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if header["levels"] == LEVELS_4:
        packed = _numbers(parts[1], blocks * BLOCK // 2, np.uint8)
        numbers = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.float32) - LEVELS_4
    else:
        numbers = _numbers(parts[1], blocks * BLOCK, np.uint8).astype(np.float32)
    values = (numbers.reshape(-1, BLOCK) * scales[:, None]).reshape(-1)[:count]
    if kind == "root8":
        return values * values
    if kind == "delta4":
        if base is None:
            raise ValueError("is a difference, and its base is missing")
        return values + base.float().numpy().reshape(-1)
    return values


def _quantise(numbers: np.ndarray, levels: int, *, round_up: bool) -> tuple[np.ndarray, np.ndarray]:
    """(numbers in bytes, bf16 scales as uint16) of blocks of BLOCK."""
    padded = np.zeros(-(-len(numbers) // BLOCK) * BLOCK, np.float32)
    padded[: len(numbers)] = numbers
    blocks = padded.reshape(-1, BLOCK)
    exact = np.abs(blocks).max(1) / np.float32(levels)
    scales = ((exact.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)  # rounded up: nothing is clipped
    divisor = (scales.astype(np.uint32) << 16).view(np.float32)[:, None]
    scaled = np.divide(blocks, divisor, out=np.zeros_like(blocks), where=divisor > 0)
    if round_up:
        return np.minimum(np.ceil(scaled), levels).astype(np.uint8).reshape(-1), scales
    whole = (np.clip(np.rint(scaled), -levels, levels) + levels).astype(np.uint8).reshape(-1, 2)
    return whole[:, 0] | (whole[:, 1] << 4), scales


# --- bytes --------------------------------------------------------------------------------------------------------


def _numbers(part: Any, count: int, dtype: Any) -> np.ndarray:
    if isinstance(part, np.ndarray):
        return part
    return np.frombuffer(_decompress(part, count * np.dtype(dtype).itemsize), dtype)


def _compress(data: np.ndarray) -> bytes:
    return bytes(pa.Codec("zstd", compression_level=ZSTD_LEVEL).compress(np.ascontiguousarray(data), asbytes=True))


def _decompress(data: Any, size_bytes: int) -> Any:
    return pa.Codec("zstd").decompress(data, decompressed_size=size_bytes)


def _pack(header: dict[str, Any], parts: list[bytes]) -> np.ndarray:
    head = json.dumps(header | {"sizes": [len(part) for part in parts]}, separators=(",", ":")).encode()
    return np.frombuffer(b"".join([len(head).to_bytes(4, "little"), head, *parts]), np.uint8)


def _unpack(data: np.ndarray) -> tuple[dict[str, Any], list[memoryview]]:
    view = memoryview(data.tobytes())
    at = 4 + int.from_bytes(view[:4], "little")
    header = json.loads(bytes(view[4:at]))
    parts = []
    for size in header["sizes"]:
        parts.append(view[at : at + size])
        at += size
    return header, parts
