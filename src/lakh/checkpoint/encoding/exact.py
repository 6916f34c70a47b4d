"""Bit-exact encoding of a slice.

Numbers in float32 are differences of bit patterns, which are about logarithms, to a prediction; a sample decides which:

    base    the base, in groups by its exponent: differences are multiples of its last bit, so that their size depends
            on it. The groups whose numbers are smaller than their changes are encoded by themselves. Weights.
    means   a share of the base, and means of rows and columns of what is left. Moments: first moments forget their
            base within ten steps, second moments keep a part of it.
    self    nothing

Other types are differences to the base or themselves, in byte planes. Of a matrix in which few rows changed, as of an
embedding table, only these rows and their numbers are encoded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lakh.checkpoint.encoding.parts import compress, decompress, pack, unpack
from lakh.checkpoint.encoding.residuals import NUM_PARTS, cost_bits, decode_residuals, encode_residuals

__all__ = ["decode_exact", "encode_exact"]

SAMPLE = 1 << 16
SAMPLED_ROWS = 256
MANY_ROWS = 0.5  # of a matrix: with more changed rows it is encoded as a whole
MIN_GROUP, MAX_GROUPS = 4096, 64
SLOPE_BITS = 10
MAGNITUDE, SIGN = np.uint32(0x7FFFFFFF), np.uint32(31)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

Prediction = tuple[int, np.ndarray, np.ndarray]
"""The share of the base's bit pattern in 2^-SLOPE_BITS, and int32 numbers for rows and columns to add."""


def encode_exact(tensor: Tensor, base: Tensor | None) -> np.ndarray:
    if base is not None and tensor.dim() == 2 and len(tensor):
        rows = _changed_rows(tensor, base)
        if rows is not None:
            row_numbers = compress(np.diff(rows, prepend=0).astype(np.uint32))
            at = torch.from_numpy(rows)
            changed = encode_exact(tensor[at].reshape(-1), base[at].reshape(-1)).tobytes()
            return pack({"kind": "exact", "of": "rows", "rows": len(rows)}, [row_numbers, changed])
    if tensor.dtype == torch.float32:
        return _encode_floats(tensor, base)
    bits, is_float = _bits_of(tensor), tensor.dtype.is_floating_point
    planes = {"self": _planes(_rotate(bits, is_float))}
    if base is not None:
        planes["base"] = _planes(_difference(bits, _bits_of(base.detach().contiguous()), is_float))
    chosen = min(planes, key=lambda name: sum(map(len, planes[name][1])))
    return pack({"kind": "exact", "of": chosen, "stored": planes[chosen][0]}, planes[chosen][1])


def decode_exact(
    header: dict[str, Any], parts: list[memoryview], dtype: torch.dtype, shape: tuple[int, ...], base: Tensor | None
) -> Tensor:
    if header["of"] == "rows":
        return _decode_rows(header, parts, dtype, base).reshape(shape)
    base_bits = _bits_of(base.detach().contiguous()) if base is not None else None
    if base_bits is None and (header["of"] == "base" or header.get("slope")):
        raise ValueError("is a difference, and its base is missing")
    if dtype == torch.float32:
        if "stored" in header:
            raise ValueError("was written by an earlier version of lakh, whose differences this one cannot read")
        bits = _decode_floats(header, parts, shape, base_bits)
    else:
        numbers = _join_planes(header["stored"], parts, math.prod(shape), dtype.itemsize)
        is_float = dtype.is_floating_point
        if header["of"] == "self":
            bits = _rotate_back(numbers, is_float)
        else:
            assert base_bits is not None  # checked above
            bits = _add_difference(numbers, base_bits, is_float)
    return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(shape)


# --- rows ---------------------------------------------------------------------------------------------------------


def _changed_rows(tensor: Tensor, base: Tensor) -> np.ndarray | None:
    """The numbers of the rows whose bits differ; None if they are many, also in a sample of the rows."""
    for step in (-(-len(tensor) // SAMPLED_ROWS), 1):
        part, before = tensor[::step].contiguous(), base.detach()[::step].contiguous()
        rows = np.flatnonzero((_bits_of(part) != _bits_of(before)).reshape(len(part), -1).any(axis=1))
        if len(rows) > MANY_ROWS * len(part):
            return None
    return rows


def _decode_rows(header: dict[str, Any], parts: list[memoryview], dtype: torch.dtype, base: Tensor | None) -> Tensor:
    """The base with its changed rows."""
    if base is None or base.dim() != 2:
        raise ValueError("is a difference, and its base is missing")
    count = int(header["rows"])
    numbers, changed = parts
    rows = np.frombuffer(decompress(numbers, 4 * count), np.uint32).cumsum(dtype=np.int64)
    if count and rows[-1] >= len(base):
        raise ValueError("names a row that its base does not have")
    whole, at = base.detach().clone(), torch.from_numpy(rows)
    inner_header, inner_parts = unpack(np.frombuffer(changed, np.uint8))
    values = decode_exact(inner_header, inner_parts, dtype, (count * base.shape[1],), base[at].reshape(-1))
    whole[at] = values.view(count, base.shape[1])
    return whole


# --- float32 ------------------------------------------------------------------------------------------------------


def _encode_floats(tensor: Tensor, base: Tensor | None) -> np.ndarray:
    bits = _bits_of(tensor)
    base_bits = _bits_of(base.detach().contiguous()) if base is not None else None
    shape = _matrix_shape(tensor.shape)
    chosen = _cheapest(bits, base_bits, shape)
    header: dict[str, Any] = {"kind": "exact", "of": chosen}
    parts: list[bytes] = []
    if chosen == "base" and base_bits is not None:
        header["ranges"], header["changes"] = [], []
        for group in _groups_of_exponents(base_bits):
            _, is_change, numbers, signs = _cheaper(bits[group], base_bits[group])
            found, group_parts = encode_residuals(numbers, signs)
            header["ranges"].append(found)
            header["changes"].append(int(is_change))
            parts += group_parts
        return pack(header, parts)
    differences = (bits & MAGNITUDE).view(np.int32)
    if chosen == "means" and shape is not None:
        slope, rows, columns = prediction = _fit(bits, base_bits, shape)
        header["slope"] = slope
        parts += [rows.tobytes(), columns.tobytes()]
        differences = differences - _predict(prediction, base_bits)
    header["range"], planes = encode_residuals(differences, bits >> SIGN)
    return pack(header, parts + planes)


def _decode_floats(
    header: dict[str, Any], parts: list[memoryview], shape: tuple[int, ...], base_bits: np.ndarray | None
) -> np.ndarray:
    count = math.prod(shape)
    if header["of"] == "base":
        assert base_bits is not None  # checked by the caller
        groups = _groups_of_exponents(base_bits)
        if len(base_bits) != count or len(header["ranges"]) != len(groups):
            raise ValueError("has groups of another base")
        bits = np.empty(count, np.uint32)
        for at, (found, is_change, group) in enumerate(zip(header["ranges"], header["changes"], groups, strict=True)):
            numbers, signs = decode_residuals(found, parts[at * NUM_PARTS : (at + 1) * NUM_PARTS], len(group))
            bits[group] = _change(base_bits[group], numbers, signs) if is_change else _join(numbers, signs)
        return bits
    differences, signs = decode_residuals(header["range"], parts[-NUM_PARTS:], count)
    if header["of"] == "means":
        rows, columns = (np.frombuffer(part, np.int32) for part in parts[:2])
        if (len(rows), len(rows) * len(columns)) != (shape[0], count):
            raise ValueError("has means of another shape")
        differences = differences + _predict((header["slope"], rows, columns), base_bits)
    return _join(differences, signs)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns; None if there are none whose means could help."""
    if len(shape) < 2 or min(shape[0], math.prod(shape[1:])) < 2:
        return None
    return shape[0], math.prod(shape[1:])


def _cheapest(bits: np.ndarray, base_bits: np.ndarray | None, shape: tuple[int, int] | None) -> str:
    """The prediction with the shortest differences, of rows in the middle."""
    columns = shape[1] if shape else 1
    num_rows = len(bits) // columns
    taken = min(num_rows, max(2, SAMPLE // columns))
    first = (num_rows - taken) // 2
    part = slice(first * columns, (first + taken) * columns)
    some, before = bits[part], base_bits[part] if base_bits is not None else None
    magnitudes = (some & MAGNITUDE).view(np.int32)
    signs = some >> SIGN
    costs = {"self": cost_bits(magnitudes, signs)}
    if before is not None:
        groups = _groups_of_exponents(before)
        costs["base"] = sum(_cheaper(some[group], before[group])[0] for group in groups)
    if shape is not None:
        prediction = _fit(some, before, (taken, columns))
        costs["means"] = cost_bits(magnitudes - _predict(prediction, before), signs)
    return min(costs, key=lambda name: costs[name])


def _fit(bits: np.ndarray, base_bits: np.ndarray | None, shape: tuple[int, int]) -> Prediction:
    levels = (bits & MAGNITUDE).reshape(shape).astype(np.float64)
    slope = 0
    if base_bits is not None:
        before = (base_bits & MAGNITUDE).reshape(shape).astype(np.float64)
        step = -(-shape[0] // SAMPLED_ROWS)
        ours, theirs = _centred(levels[::step]), _centred(before[::step])
        spread = float(np.square(theirs).sum())
        share = float((ours * theirs).sum()) / spread if spread else 0.0
        slope = round(min(1.0, max(0.0, share)) * (1 << SLOPE_BITS))
        levels -= before * (slope / (1 << SLOPE_BITS))
    rows = np.rint(levels.mean(1))
    columns = np.rint((levels - rows[:, None]).mean(0))
    return slope, rows.astype(np.int64).astype(np.int32), columns.astype(np.int64).astype(np.int32)


def _centred(levels: np.ndarray) -> np.ndarray:
    levels = levels - levels.mean(1, keepdims=True)
    return levels - levels.mean(0, keepdims=True)


def _predict(prediction: Prediction, base_bits: np.ndarray | None) -> np.ndarray:
    """In int32 modulo 2^32: whole numbers, so that every machine computes the same."""
    slope, rows, columns = prediction
    found = np.add.outer(rows, columns).reshape(-1)
    if slope and base_bits is not None:
        found += ((base_bits & MAGNITUDE).astype(np.int64) * slope >> SLOPE_BITS).astype(np.int32)
    return found


def _groups_of_exponents(bits: np.ndarray) -> list[np.ndarray]:
    """The places of float32 numbers by their exponent; the rare exponents together, last."""
    exponents = ((bits >> 23) & 0xFF).astype(np.uint8)
    order = np.argsort(exponents, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(exponents[order])) + 1)
    least = max(MIN_GROUP, len(bits) // MAX_GROUPS)
    rare = [group for group in groups if len(group) < least]
    return [group for group in groups if len(group) >= least] + ([np.concatenate(rare)] if rare else [])


def _cheaper(bits: np.ndarray, base: np.ndarray) -> tuple[float, bool, np.ndarray, np.ndarray]:
    """Its cost, whether it is a change of the base, magnitudes and signs: of the change or of the numbers."""
    magnitudes = (bits & MAGNITUDE).view(np.int32)
    own = (magnitudes, bits >> SIGN)
    change = (magnitudes - (base & MAGNITUDE).view(np.int32), (bits ^ base) >> SIGN)
    own_cost, change_cost = cost_bits(*own), cost_bits(*change)
    return (change_cost, True, *change) if change_cost < own_cost else (own_cost, False, *own)


def _join(magnitudes: np.ndarray, signs: np.ndarray | None) -> np.ndarray:
    bits = magnitudes.view(np.uint32)
    return bits if signs is None else bits | (signs << SIGN)


def _change(base: np.ndarray, differences: np.ndarray, signs: np.ndarray | None) -> np.ndarray:
    magnitudes = (base & MAGNITUDE) + differences.view(np.uint32)
    return _join(magnitudes, base >> SIGN if signs is None else signs ^ (base >> SIGN))


# --- other types --------------------------------------------------------------------------------------------------


def _bits_of(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy().view(_UNSIGNED[tensor.element_size()])


def _ordered(bits: np.ndarray, is_float: bool) -> np.ndarray:
    """Unsigned numbers in the order of the floating-point numbers that the bits stand for."""
    if not is_float:
        return bits
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _from_ordered(ordered: np.ndarray) -> np.ndarray:
    sign = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def _difference(bits: np.ndarray, base: np.ndarray, is_float: bool) -> np.ndarray:
    """Small in its high bytes if the values are close: the sign is in the lowest bit."""
    signed = (_ordered(bits, is_float) - _ordered(base, is_float)).view(_SIGNED[bits.itemsize])
    return ((signed << 1) ^ (signed >> (8 * bits.itemsize - 1))).view(bits.dtype)


def _add_difference(numbers: np.ndarray, base: np.ndarray, is_float: bool) -> np.ndarray:
    signed = (numbers >> 1) ^ (~(numbers & 1) + numbers.dtype.type(1))
    ordered = _ordered(base, is_float) + signed
    return _from_ordered(ordered) if is_float else ordered


def _rotate(bits: np.ndarray, is_float: bool) -> np.ndarray:
    """The sign moves to the lowest bit, so that the highest byte is the exponent alone."""
    return (bits << 1) | (bits >> (8 * bits.itemsize - 1)) if is_float else bits


def _rotate_back(numbers: np.ndarray, is_float: bool) -> np.ndarray:
    return (numbers >> 1) | (numbers << (8 * numbers.itemsize - 1)) if is_float else numbers


def _planes(numbers: np.ndarray) -> tuple[list[bool], list[bytes]]:
    """The bytes of each significance, lowest first, compressed unless that makes them larger (then stored)."""
    columns = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize)
    stored, parts = [], []
    for at in range(numbers.itemsize):
        plane = np.ascontiguousarray(columns[:, at])
        part = compress(plane)
        stored.append(len(part) >= len(plane))
        parts.append(plane.tobytes() if stored[-1] else part)
    return stored, parts


def _join_planes(stored: list[bool], parts: list[memoryview], count: int, width: int) -> np.ndarray:
    planes = np.empty((count, width), np.uint8)
    for at, (is_stored, part) in enumerate(zip(stored, parts, strict=True)):
        planes[:, at] = np.frombuffer(part if is_stored else decompress(part, count), np.uint8)
    return planes.reshape(-1).view(_UNSIGNED[width])
