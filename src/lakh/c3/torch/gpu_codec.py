"""int8 and int4 codecs on a GPU: Triton kernels that produce the same bytes as the native core (native/src/codec.h).

    wire = encode("int4", gradients, residual)         # uint8, 18 bytes for every 32 values
    total = decode_sum("int4", [wire_0, wire_1], n)    # float32, added in this order

Every result is one IEEE operation in the order of the native codec: divisions round to nearest, and multiply and add
are never fused. One program of one warp processes 32 groups of 32; the wire is read and written in 16-bit words. Costs
one pass over memory: the kernels are memory-bound, not compute-bound (bench/results). Requires triton, which comes with
torch on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lakh.errors import UserError
from lakh.spec.schedule import codec_bytes

__all__ = ["decode_sum", "encode"]

GROUP = 32
BITS = {"int8": 8, "int4": 4}
GROUPS_PER_PROGRAM = 32


def encode(codec: str, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Encode contiguous float32 `values`.

    With `residual` (error feedback), encodes values + residual and stores the encoding error in `residual`.
    """
    bits = _bits(codec)
    if values.dtype != torch.float32 or not values.is_contiguous():
        raise UserError(f"c3 {codec}", f"a tensor of {values.dtype}", "give contiguous float32")
    count = values.numel()
    wire = torch.empty(codec_bytes(codec, count), dtype=torch.uint8, device=values.device)
    if count:
        _encode[_programs(count)](
            values,
            residual if residual is not None else values,
            wire.view(torch.int16),
            count,
            feedback=residual is not None,
            bits=bits,
            groups=GROUPS_PER_PROGRAM,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return wire


def decode_sum(
    codec: str,
    wires: torch.Tensor | Sequence[torch.Tensor],
    count: int,
    divisor: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the decoded `wires`, added in their order and divided by `divisor`."""
    bits = _bits(codec)
    packets = wires if isinstance(wires, torch.Tensor) else torch.stack(list(wires))
    packets = packets.view(-1, codec_bytes(codec, count)) if count else packets
    total = out if out is not None else torch.empty(count, dtype=torch.float32, device=packets.device)
    if count:
        _decode[_programs(count)](
            packets.view(torch.int16),
            total,
            count,
            packets.shape[1] // 2,
            divisor,
            packets=packets.shape[0],
            bits=bits,
            groups=GROUPS_PER_PROGRAM,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return total


def _bits(codec: str) -> int:
    if codec not in BITS:
        raise UserError("c3 on a GPU", f"no kernel for the codec {codec!r}", "choose int8 or int4")
    return BITS[codec]


def _programs(count: int) -> tuple[int]:
    return (triton.cdiv(count, GROUP * GROUPS_PER_PROGRAM),)


@triton.jit
def _rounded_bf16(value):
    """The bits of a finite float32 as bfloat16, to nearest even."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _load(pointers, there, whole: tl.constexpr):
    """Opaque masks limit every load and store to 4 bytes, so a complete tile uses none."""
    if whole:
        return tl.load(pointers)
    else:  # noqa: RET505 - Triton continues after the return
        return tl.load(pointers, mask=there, other=0)


@triton.jit
def _store(pointers, values, there, whole: tl.constexpr):
    if whole:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=there)


@triton.jit
def _divided(size, limit: tl.constexpr):
    """size / limit as IEEE division rounds it, without its cost. No quotient of a 24-bit number by 7 or 127 is nearer
    to a midpoint of two float32 than 2^-33 of itself, and the float64 product is off by 2^-52 at most."""
    return (size.to(tl.float64) * (1.0 / limit)).to(tl.float32)


@triton.jit
def _inverse(scale):
    """1 / scale as IEEE division rounds it, 0 for 0. A scale has 8 bits, so its inverse is no nearer to a midpoint than
    2^-33 of itself, and one step of Newton's leaves 2^-43. Small ones are lifted by a power of two meanwhile."""
    small = scale < 1e-30
    lifted = tl.where(small, scale * 16777216.0, scale)
    guess = 1.0 / lifted
    guess = tl.fma(tl.fma(-lifted, guess, 1.0), guess, guess)
    return tl.where(scale == 0.0, 0.0, tl.where(small, guess * 16777216.0, guess))


@triton.jit(do_not_specialize=["count"])
def _encode(values, residual, wire, count, feedback: tl.constexpr, bits: tl.constexpr, groups: tl.constexpr):
    words: tl.constexpr = 32 * bits // 16
    first = tl.program_id(0).to(tl.int64) * groups
    left = count - first * 32
    wire += first * (words + 1)
    if left >= groups * 32:
        _encode_tile(values + first * 32, residual + first * 32, wire, 0, feedback, bits, groups, True)
    else:
        _encode_tile(values + first * 32, residual + first * 32, wire, left.to(tl.int32), feedback, bits, groups, False)


@triton.jit
def _encode_tile(
    values,
    residual,
    wire,
    left,
    feedback: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    whole: tl.constexpr,
):
    limit: tl.constexpr = (1 << (bits - 1)) - 1
    per_word: tl.constexpr = 16 // bits
    words: tl.constexpr = 32 // per_word
    group = tl.arange(0, groups)
    index = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = _load(values + index, index < left, whole)
    if feedback:
        x = x + _load(residual + index, index < left, whole)
    # Sizes order as their bits do, infinities and NaN above all.
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale_bits = tl.where(top < 0x7F800000, _rounded_bf16(_divided(top.to(tl.float32, bitcast=True), limit)), 0x7FC0)
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    k = tl.minimum(tl.maximum(x * _inverse(scale)[:, None], -limit * 1.0), limit * 1.0)  # a NaN becomes -limit
    # To the nearest whole number, halves to even: in k + 1.5 * 2^23 no bit is left behind the point, and the last bits
    # are those of the number.
    k = k + 12582912.0
    if feedback:
        _store(residual + index, x - (k - 12582912.0) * scale[:, None], index < left, whole)
    codes = tl.reshape(k.to(tl.int32, bitcast=True) & ((1 << bits) - 1), (groups, words, per_word))
    packed = tl.sum(codes << (tl.arange(0, per_word) * bits)[None, None, :], axis=2)
    start = wire + group * (words + 1)
    begun = group * 32 < left
    _store(start, scale_bits.to(tl.int16), begun, whole)
    _store(start[:, None] + 1 + tl.arange(0, words)[None, :], packed.to(tl.int16), begun[:, None], whole)


@triton.jit(do_not_specialize=["count", "packet_words", "divisor"])
def _decode(
    wires,
    total,
    count,
    packet_words,
    divisor,
    packets: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
):
    words: tl.constexpr = 32 * bits // 16
    first = tl.program_id(0).to(tl.int64) * groups
    left = count - first * 32
    wires += first * (words + 1)
    total += first * 32
    if left >= groups * 32:
        _decode_tile(wires, total, 0, packet_words, divisor, packets, bits, groups, True)
    else:
        _decode_tile(wires, total, left.to(tl.int32), packet_words, divisor, packets, bits, groups, False)


@triton.jit
def _decode_tile(
    wires,
    total,
    left,
    packet_words,
    divisor,
    packets: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    whole: tl.constexpr,
):
    index = tl.arange(0, groups)[:, None] * 32 + tl.arange(0, 32)[None, :]
    acc = _values(wires, left, bits, groups, whole)
    for packet in tl.static_range(1, packets):
        acc = acc + _values(wires + packet_words.to(tl.int64) * packet, left, bits, groups, whole)
    if divisor > 1:
        acc = tl.div_rn(acc, tl.zeros((groups, 32), dtype=tl.float32) + divisor)
    _store(total + index, acc, index < left, whole)


@triton.jit
def _values(wire, left, bits: tl.constexpr, groups: tl.constexpr, whole: tl.constexpr):
    """Decoded values of some groups of a packet. Each value loads its own 16-bit word: it is cached, and no data moves
    between threads."""
    per_word: tl.constexpr = 16 // bits
    words: tl.constexpr = 32 // per_word
    group, lane = tl.arange(0, groups), tl.arange(0, 32)
    start = wire + group * (words + 1)
    begun = group * 32 < left
    scale_bits = _load(start, begun, whole).to(tl.int32)
    packed = _load(start[:, None] + 1 + (lane // per_word)[None, :], begun[:, None], whole)
    codes = (packed.to(tl.int32) << (32 - bits - (lane % per_word) * bits)[None, :]) >> (32 - bits)  # with its sign
    return codes.to(tl.float32) * (scale_bits << 16).to(tl.float32, bitcast=True)[:, None]
