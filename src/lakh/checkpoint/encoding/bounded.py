"""Encodings with a bounded error; `encoding/__init__.py` lists them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from lakh.checkpoint.encoding.parts import compress, decompress, pack

__all__ = ["BLOCK", "BLOCK_BOUNDS", "decode_bounded", "encode_bounded"]

BLOCK = 128
LEVELS = {"delta5": 20, "value5": 15, "delta4": 7, "value4": 7, "root8": 255}
"""On each side of zero; of roots, which are not negative, in all."""
PACKED_LEVELS = 7  # two numbers in a byte
LOG_STEP = 0.25
MAX_LOG_STEPS = 126
ZERO_LOG = -127
BLOCK_BOUNDS = {
    **{kind: 1 / (2 * levels) for kind, levels in LEVELS.items() if kind != "root8"},
    "root8": 1 / LEVELS["root8"],
    "log": 2 ** (LOG_STEP / 4) - 1,
}
"""The largest error of a value, as a share of the largest magnitude of its block (of differences, values or roots), or
of its own root (log); the bf16 scale, rounded up, adds at most 1 % of it."""


def encode_bounded(kind: str, values: np.ndarray, base: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The bytes, and the values that a reader gets."""
    if kind == "factored" and (values.ndim < 2 or min(values.shape[0], values.size // values.shape[0]) < 2):
        kind = "log"
    header: dict[str, Any]
    logs = _quantise_logs(values) if kind == "log" else None
    if kind == "log" and logs is None:
        kind = "root8"
    if logs is not None:
        header, parts = {"kind": kind, "step": LOG_STEP}, logs
    elif kind == "factored":
        rows = values.reshape(values.shape[0], -1)
        header = {"kind": kind}
        parts = [rows.mean(1, dtype=np.float64).astype(np.float32), rows.mean(0, dtype=np.float64).astype(np.float32)]
    else:
        numbers = values.reshape(-1)
        if kind.startswith("delta") and base is not None:
            numbers = numbers - base.float().numpy().reshape(-1)
        elif kind == "root8":
            numbers = np.sqrt(numbers)
        levels = LEVELS[kind]
        quantised, scales = _quantise(numbers, levels, round_up=kind == "root8")
        header, parts = {"kind": kind, "levels": levels}, [scales, quantised]
    return pack(header, [compress(part) for part in parts]), decode_bounded(header, parts, values.shape, base)


def decode_bounded(header: dict[str, Any], parts: list[Any], shape: tuple[int, ...], base: Tensor | None) -> np.ndarray:
    """The values in float32; `parts` are arrays, or compressed bytes."""
    count, kind = math.prod(shape), header["kind"]
    if kind == "factored":
        columns = count // shape[0]
        row, column = (_numbers(part, size, np.float32) for part, size in zip(parts, (shape[0], columns), strict=True))
        mean = float(row.mean(dtype=np.float64))
        return (np.outer(row, column) / mean if mean else np.zeros((shape[0], columns))).astype(np.float32)
    if kind == "log":
        return _restore_logs(parts, shape, header["step"])
    blocks = -(-count // BLOCK)
    scales = (_numbers(parts[0], blocks, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if header["levels"] == PACKED_LEVELS:
        packed = _numbers(parts[1], blocks * BLOCK // 2, np.uint8)
        numbers = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.float32) - PACKED_LEVELS
    else:
        lowest = 0 if kind == "root8" else header["levels"]
        numbers = _numbers(parts[1], blocks * BLOCK, np.uint8).astype(np.float32) - lowest
    values = (numbers.reshape(-1, BLOCK) * scales[:, None]).reshape(-1)[:count]
    if kind == "root8":
        return values * values
    if kind.startswith("delta"):
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
    return (whole[:, 0] | (whole[:, 1] << 4) if levels == PACKED_LEVELS else whole.reshape(-1)), scales


def _quantise_logs(values: np.ndarray) -> list[np.ndarray] | None:
    """Means of the logarithms of rows and of columns, and the steps from their sum to each value. None if a value is
    negative or too far from them."""
    rows = values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)
    if (rows < 0).any():
        return None
    is_zero = rows == 0
    logs = np.log2(np.where(is_zero, np.float32(1), rows))
    counts = np.maximum(rows.shape[1] - is_zero.sum(1), 1)
    row_means = (np.where(is_zero, 0, logs).sum(1, dtype=np.float64) / counts).astype(np.float32)
    logs = logs - row_means[:, None]
    column_means = np.zeros(0, np.float32)
    if values.ndim > 1 and len(rows) > 1:
        counts = np.maximum(len(rows) - is_zero.sum(0), 1)
        column_means = (np.where(is_zero, 0, logs).sum(0, dtype=np.float64) / counts).astype(np.float32)
        logs = logs - column_means
    steps = np.rint(logs / np.float32(LOG_STEP))
    if np.abs(np.where(is_zero, 0, steps)).max() > MAX_LOG_STEPS:
        return None
    return [row_means, column_means, np.where(is_zero, ZERO_LOG, steps).astype(np.int8).reshape(-1)]


def _restore_logs(parts: list[Any], shape: tuple[int, ...], step: float) -> np.ndarray:
    count = math.prod(shape)
    num_rows = shape[0] if len(shape) > 1 else 1
    row_means = _numbers(parts[0], num_rows, np.float32)
    column_means = _numbers(parts[1], count // num_rows if num_rows > 1 else 0, np.float32)
    steps = _numbers(parts[2], count, np.int8).reshape(num_rows, -1)
    logs = steps.astype(np.float32) * np.float32(step) + row_means[:, None]
    if len(column_means):
        logs = logs + column_means
    return np.where(steps == ZERO_LOG, np.float32(0), np.exp2(logs)).reshape(-1)


def _numbers(part: Any, count: int, dtype: Any) -> np.ndarray:
    if isinstance(part, np.ndarray):
        return part
    return np.frombuffer(decompress(part, count * np.dtype(dtype).itemsize), dtype)
