"""Quantized tensor types of GGUF: which type each tensor of a file gets, the K types in numpy, and the integers inside.

A type stores blocks of 32 numbers (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1) or superblocks of 256 (Q4_K, Q5_K: eight groups of 32
with a scale and a minimum of 6 bits each; Q6_K: sixteen groups of 16 with a scale of 8 bits). The `gguf` package reads
all of them and writes those with blocks of 32; `encode` also writes the K types. A superblock needs a number of columns
that 256 divides; other matrices get the next larger type with blocks of 32, as llama.cpp does.

`integers` returns the stored integers in groups of 32, for engines that compute with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FORMATS", "GgufTensor", "GroupedIntegers", "encode", "integers", "type_of_tensor"]

GROUP, SUPERBLOCK = 32, 256
FORMATS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_1", "q4_0", "bf16", "f16", "f32")
"""Formats of a file; those with _m use a larger type for some tensors."""
_WITHOUT_SUPERBLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
SEARCH_STEPS = 16  # scales that are tried for each group of a K type


@dataclass(frozen=True)
class GgufTensor:
    """A matrix as it is in a file."""

    type: str
    rows: np.ndarray
    """Rows x bytes."""
    columns: int


@dataclass(frozen=True)
class GroupedIntegers:
    """number = scale * value + minimum, in groups of 32 columns."""

    bits: int
    values: np.ndarray
    """Rows x groups x 32: 8 bits signed, or 4 bits without a sign."""
    scales: np.ndarray
    """Rows x groups, float32."""
    minimums: np.ndarray | None = None


def type_of_tensor(form: str, name: str, layer: int, layers: int, columns: int, *, is_head: bool) -> str:
    """The type of a matrix in a file of this format; `name` is GGUF's. The rule for more bits is llama.cpp's: the head,
    and in the first eighth, the last eighth and every third of the other layers values and the second feed-forward
    matrix."""
    kind = form.removesuffix("_m").upper()
    if form.endswith("_m"):
        eighth = layers // 8
        has_more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        if is_head or (has_more and (".attn_v." in name or ".ffn_down." in name)):
            kind = "Q6_K"
    elif is_head and kind in ("Q4_0", "Q4_1"):
        kind = "Q6_K"
    if columns % SUPERBLOCK and kind in _WITHOUT_SUPERBLOCKS:
        kind = _WITHOUT_SUPERBLOCKS[kind]
    if columns % GROUP and kind.startswith("Q"):
        kind = "F16"
    return kind


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 rows x columns to rows x bytes of this type."""
    if kind in ("Q4_K", "Q5_K"):
        return _encode_k(values, bits=int(kind[1]))
    if kind == "Q6_K":
        return _encode_q6_k(values)
    import gguf

    found: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return found.reshape(len(values), -1).view(np.uint8)


# --- K types ------------------------------------------------------------------------------------------------


def _encode_k(values: np.ndarray, bits: int) -> np.ndarray:
    groups = values.astype(np.float32).reshape(-1, 8, GROUP)
    largest = (1 << bits) - 1
    scales, offsets = _best_scales(groups, largest)
    d, dmin = _half(scales.max(axis=1) / 63), _half(offsets.max(axis=1) / 63)
    scale_6, offset_6 = (_ratio(part, unit).clip(0, 63) for part, unit in ((scales, d), (offsets, dmin)))
    own, minimum = d[:, None] * scale_6, dmin[:, None] * offset_6
    numbers = _ratio(groups + minimum[..., None], own).clip(0, largest).astype(np.uint8)
    low, high = numbers & 15, numbers >> 4
    pairs = low.reshape(-1, 4, 2, GROUP)
    parts = [_bytes(d), _bytes(dmin), _pack_6_bits(scale_6.astype(np.uint8), offset_6.astype(np.uint8))]
    if bits == 5:
        parts.append(np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[None, :, None], axis=1))
    parts.append((pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128))
    return np.concatenate(parts, axis=1).reshape(len(values), -1)


def _best_scales(groups: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """For each group the scale and the offset (the negated minimum, at least 0) with the least weighted squared error.

    Large numbers weigh more: they matter more to a product. Candidates are the span divided by a few numbers near the
    largest integer, each refined by a least-squares fit of scale and offset to its integers.
    """
    weight = np.sqrt((groups**2).mean(axis=-1, keepdims=True)) + np.abs(groups)
    low = np.minimum(groups.min(axis=-1), 0)
    span = groups.max(axis=-1) - low
    best = np.full(groups.shape[:2], np.inf, np.float32)
    scales, offsets = span / largest, -low
    total, sum_x = weight.sum(-1), (weight * groups).sum(-1)
    for step in range(SEARCH_STEPS):
        candidate = span / (largest - 1 + 2 * step / (SEARCH_STEPS - 1))
        q = _ratio(groups - low[..., None], candidate).clip(0, largest)
        sum_q, sum_qq, sum_qx = (weight * q).sum(-1), (weight * q * q).sum(-1), (weight * q * groups).sum(-1)
        divisor = total * sum_qq - sum_q**2
        is_solvable = divisor > 1e-30
        fitted = np.divide(total * sum_qx - sum_q * sum_x, divisor, out=candidate.copy(), where=is_solvable)
        offset = np.where(is_solvable, (fitted * sum_q - sum_x) / np.maximum(total, 1e-30), -low)
        # A minimum above zero cannot be stored: fit the scale alone.
        scale_alone = np.divide(sum_qx, sum_qq, out=candidate.copy(), where=sum_qq > 1e-30)
        fitted = np.maximum(np.where(offset < 0, scale_alone, fitted), 0)
        offset = np.maximum(offset, 0)
        error = (weight * (fitted[..., None] * q - offset[..., None] - groups) ** 2).sum(-1)
        is_better = error < best
        best[is_better] = error[is_better]
        scales = np.where(is_better, fitted, scales)
        offsets = np.where(is_better, offset, offsets)
    return scales, offsets


def _pack_6_bits(scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Eight scales and eight offsets of 6 bits in 12 bytes: the first four of each, their upper bits filled with those
    of the others, then the lower halves of the others."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = offsets[:, :4] | ((offsets[:, 4:] >> 4) << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | ((offsets[:, 4:] & 15) << 4)], axis=1)


def _unpack_6_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=-1)
    return scales, np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=-1)


def _encode_q6_k(values: np.ndarray) -> np.ndarray:
    groups = values.astype(np.float32).reshape(-1, 16, 16)
    weight = groups**2
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), axis=-1)[..., 0]
    best, scales = np.full(groups.shape[:2], -np.inf, np.float32), np.zeros(groups.shape[:2], np.float32)
    for step in range(SEARCH_STEPS):
        # The extreme becomes -32, which has no positive counterpart, or a little less.
        candidate = extreme / -(30.5 + 2 * step / (SEARCH_STEPS - 1))
        q = _ratio(groups, candidate).clip(-32, 31)
        sum_qq, sum_qx = (weight * q * q).sum(-1), (weight * q * groups).sum(-1)
        gain = np.divide(sum_qx**2, sum_qq, out=np.zeros_like(best), where=sum_qq > 1e-30)
        is_better = gain > best
        best[is_better] = gain[is_better]
        fitted = np.divide(sum_qx, sum_qq, out=np.zeros_like(scales), where=sum_qq > 1e-30)
        scales = np.where(is_better, fitted, scales)
    leading = np.take_along_axis(scales, np.abs(scales).argmax(-1, keepdims=True), axis=-1)[:, 0]
    d = _half(leading / -128)
    scale_8 = _ratio(scales, d).clip(-128, 127)
    q = (_ratio(groups, d[:, None] * scale_8).clip(-32, 31) + 32).astype(np.uint8)
    quarters = q.reshape(-1, 2, 4, 32)  # two halves of 128 numbers, each in quarters of 32
    low, high = quarters & 15, quarters >> 4
    ql = np.concatenate([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], axis=-1)
    qh = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    parts = [ql.reshape(-1, 128), qh.reshape(-1, 64), scale_8.astype(np.int8).view(np.uint8), _bytes(d)]
    return np.concatenate(parts, axis=1).reshape(len(values), -1)


def _half(numbers: np.ndarray) -> np.ndarray:
    """Rounded to float16, which the file stores."""
    return numbers.astype(np.float16).astype(np.float32)


def _bytes(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16)[:, None].view(np.uint8)


def _ratio(numbers: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Rounded numbers / unit; 0 where the unit is 0. The unit lacks the last dims of numbers."""
    unit = unit.reshape(unit.shape + (1,) * (numbers.ndim - unit.ndim))
    return np.rint(np.divide(numbers, unit, out=np.zeros_like(numbers), where=unit != 0))


# --- integers -----------------------------------------------------------------------------------------------


def integers(tensor: GgufTensor) -> GroupedIntegers | None:
    """The integers of a tensor; None for types that do not consist of groups of 32, which must be dequantized.

    Q6_K has groups of 16: the larger scale of two becomes that of 32 numbers of 8 bits, four times as fine, so that
    only the group with the smaller scale is rounded again.
    """
    read = _READERS.get(tensor.type)
    if read is None:
        return None
    size = SUPERBLOCK if tensor.type.endswith("_K") else GROUP
    blocks = tensor.rows.reshape(len(tensor.rows), tensor.columns // size, -1)
    return read(blocks)


def _float16(block: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(block[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _halves(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q8_0(blocks: np.ndarray) -> GroupedIntegers:
    return GroupedIntegers(8, np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _float16(blocks, 0))


def _q4_0(blocks: np.ndarray) -> GroupedIntegers:
    scales = _float16(blocks, 0)
    return GroupedIntegers(4, _halves(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(blocks: np.ndarray) -> GroupedIntegers:
    return GroupedIntegers(4, _halves(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2))


def _five_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """32 fifth bits in 4 bytes, then the halves."""
    fifth = np.unpackbits(np.ascontiguousarray(blocks[..., at : at + 4]), axis=-1, bitorder="little")
    return (_halves(blocks[..., at + 4 :]) | (fifth << 4)).astype(np.int8)


def _q5_0(blocks: np.ndarray) -> GroupedIntegers:
    return GroupedIntegers(8, _five_bits(blocks, 2) - np.int8(16), _float16(blocks, 0))


def _q5_1(blocks: np.ndarray) -> GroupedIntegers:
    return GroupedIntegers(8, _five_bits(blocks, 4), _float16(blocks, 0), _float16(blocks, 2))


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minimums of the groups, rows x groups."""
    scale_6, offset_6 = _unpack_6_bits(blocks[..., 4:16])
    scales = _float16(blocks, 0)[..., None] * scale_6
    return scales.reshape(len(blocks), -1), (-_float16(blocks, 2)[..., None] * offset_6).reshape(len(blocks), -1)


def _k_halves(packed: np.ndarray) -> np.ndarray:
    """128 bytes of a superblock: 32 bytes hold two groups. Rows x superblocks x 8 x 32."""
    four = packed.reshape(*packed.shape[:2], 4, 1, 32)
    return np.concatenate([four & 15, four >> 4], axis=3).reshape(*packed.shape[:2], 8, 32)


def _q4_k(blocks: np.ndarray) -> GroupedIntegers:
    return GroupedIntegers(4, _k_halves(blocks[..., 16:]).reshape(len(blocks), -1, 32), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> GroupedIntegers:
    fifth = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    numbers = _k_halves(blocks[..., 48:]) | (fifth << 4)
    return GroupedIntegers(8, numbers.astype(np.int8).reshape(len(blocks), -1, 32), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> GroupedIntegers:
    rows, count = blocks.shape[:2]
    ql, qh = blocks[..., :128].reshape(rows, count, 2, 2, 32), blocks[..., 128:192].reshape(rows, count, 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=3)  # quarters 0, 1 then 2, 3
    high = (qh >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    numbers = (low | (high << 4)).astype(np.int16).reshape(rows, count * 8, 2, 16) - 32
    scale_8 = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.int16)
    pairs = scale_8.reshape(rows, count * 8, 2)
    larger = np.abs(pairs).max(axis=-1)
    fine = 4.0 * numbers * pairs[..., None] / np.maximum(larger, 1)[..., None, None]
    values = np.rint(fine).clip(-128, 127).astype(np.int8).reshape(rows, count * 8, 32)
    d = np.repeat(_float16(blocks, 208), 8, axis=1)
    return GroupedIntegers(8, values, d * larger / 4)


_READERS: dict[str, Any] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
