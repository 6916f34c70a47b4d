"""The int8 and int4 codecs on a GPU: Triton kernels whose bytes are those of the native core (native/src/codec.h).

    wire = encode("int4", gradients, residual)         # uint8, 18 bytes for every 32 values
    total = decode_sum("int4", [wire_0, wire_1], n)    # float32, added in this order

Every operation is one IEEE operation in the order of the native codec: divisions round to nearest, and multiply and add
are never fused. One program works on many groups of 32, read and written in 16-bit words. Costs one pass over memory.
Needs triton, which comes with torch on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lakh.errors import UserError
from lakh.spec.collectives import codec_bytes

__all__ = ["decode_sum", "encode"]

GROUP = 32
BITS = {"int8": 8, "int4": 4}
GROUPS_PER_PROGRAM = 64


def encode(codec: str, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The wire form of contiguous float32 `values`.

    With `residual` (error feedback), of values + residual, and what the code loses is left in it.
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
            num_warps=4,
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
    """The sum of what `wires` hold, added in their order; over `divisor` where one is given."""
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
            num_warps=4,
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


@triton.jit(do_not_specialize=["count"])
def _encode(values, residual, wire, count, feedback: tl.constexpr, bits: tl.constexpr, groups: tl.constexpr):
    limit: tl.constexpr = (1 << (bits - 1)) - 1
    per_word: tl.constexpr = 16 // bits
    words: tl.constexpr = 32 // per_word
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    index = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = index < count
    x = tl.load(values + index, mask=there, other=0.0)
    if feedback:
        x = x + tl.load(residual + index, mask=there, other=0.0)
    size = tl.abs(x)
    finite = tl.min((size <= 3.4028234e38).to(tl.int32), axis=1) == 1  # false for a NaN
    largest = tl.max(tl.where(size <= 3.4028234e38, size, 0.0), axis=1)
    scale_bits = tl.where(finite, _rounded_bf16(tl.div_rn(largest, limit * 1.0)), 0x7FC0)
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))
    # To the nearest whole number, halves to even: adding 1.5 * 2^23 leaves no bits behind the point.
    k = (x * inverse[:, None] + 12582912.0) - 12582912.0
    k = tl.where(k > limit, limit * 1.0, k)
    k = tl.where(k >= -limit, k, -limit * 1.0)  # also a NaN
    if feedback:
        tl.store(residual + index, x - k * scale[:, None], mask=there)
    codes = tl.reshape(k.to(tl.int32) & ((1 << bits) - 1), (groups, words, per_word))
    packed = tl.sum(codes << (tl.arange(0, per_word) * bits)[None, None, :], axis=2)
    start = wire + group * (words + 1)
    begun = group * 32 < count
    tl.store(start, scale_bits.to(tl.int16), mask=begun)
    tl.store(start[:, None] + 1 + tl.arange(0, words)[None, :], packed.to(tl.int16), mask=begun[:, None])


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
    per_word: tl.constexpr = 16 // bits
    words: tl.constexpr = 32 // per_word
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    begun = group * 32 < count
    index = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    acc = tl.zeros((groups, 32), dtype=tl.float32)
    for packet in tl.static_range(packets):
        start = wires + packet_words.to(tl.int64) * packet + group * (words + 1)
        scale_bits = tl.load(start, mask=begun, other=0).to(tl.int32)
        scale = (scale_bits << 16).to(tl.float32, bitcast=True)
        packed = tl.load(start[:, None] + 1 + tl.arange(0, words)[None, :], mask=begun[:, None], other=0).to(tl.int32)
        shift = 32 - bits - tl.arange(0, per_word) * bits
        codes = (packed[:, :, None] << shift[None, None, :]) >> (32 - bits)  # the sign comes along
        value = tl.reshape(codes, (groups, 32)).to(tl.float32) * scale[:, None]
        acc = value if packet == 0 else acc + value
    if divisor > 1:
        acc = tl.div_rn(acc, tl.zeros((groups, 32), dtype=tl.float32) + divisor)
    tl.store(total + index, acc, mask=index < count)
