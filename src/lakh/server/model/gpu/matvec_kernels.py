"""Triton kernels for a decode step of a single sequence: fused matrix-vector products, and attention.

Shapes: W width, F ffn, H query heads, K key/value heads, D head size, C slots of the cache, S splits of the sequence.

The speed of reading the weights limits a step, so a product includes the norm before it and the gate or the residual
after it, and loads data that no kernel of the step writes (weights, keys and values of earlier tokens) before it waits
for the previous kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lakh.server.model.gpu.attention_kernels import int8_scale, to_int8
from lakh.server.model.gpu.kernels import launch_dependents, wait_for_previous

__all__ = ["TILES", "attend_one", "gate_up", "matvec"]

# Rows of a program, columns of a tile, warps. The first is the default. On an H200 with 1.2B parameters each of the
# others was the best for one product, or within half a percent of it, by the time of whole steps.
TILES = [(2, 1024, 4), (2, 512, 2), (8, 512, 4), (2, 2048, 4), (4, 2048, 8), (4, 1024, 4)]


@triton.jit
def matvec(
    x, norm, w, residual, y, N, K, eps,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = w @ (rms_norm(x) if NORM else x) (+ residual); w is N K.

    Weights of the matrix and the norm are loaded one tile ahead, the first before the wait.
    """
    launch_dependents(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    inside = rows[:, None] < N
    tile = w + rows[:, None].to(tl.int64) * K + cols[None, :]
    weights = tl.load(tile, mask=inside & (cols[None, :] < K), other=0.0)
    if NORM:
        gains = tl.load(norm + cols, mask=cols < K, other=0.0)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        here = k + cols
        value = tl.load(x + here, mask=here < K, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= gains.to(tl.float32)
            gains = tl.load(norm + here + BLOCK_K, mask=here + BLOCK_K < K, other=0.0)
        total += weights.to(tl.float32) * value[None, :]
        tile += BLOCK_K
        weights = tl.load(tile, mask=inside & (here[None, :] + BLOCK_K < K), other=0.0)
    result = tl.sum(total, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if RESIDUAL:
        result += tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(y + rows, result.to(y.dtype.element_ty), mask=rows < N)


@triton.jit
def gate_up(
    x, norm, w, y, N, K, eps, PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """y = silu(gate) * up, where gate and up are the first and the last N rows of w @ rms_norm(x)."""
    launch_dependents(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    inside = rows[:, None] < N
    tile = w + rows[:, None].to(tl.int64) * K + cols[None, :]
    mask = inside & (cols[None, :] < K)
    left = tl.load(tile, mask=mask, other=0.0)
    right = tl.load(tile + N * K, mask=mask, other=0.0)
    gains = tl.load(norm + cols, mask=cols < K, other=0.0)
    wait_for_previous(PDL)
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        here = k + cols
        value = tl.load(x + here, mask=here < K, other=0.0).to(tl.float32)
        squares += value * value
        value *= gains.to(tl.float32)
        gains = tl.load(norm + here + BLOCK_K, mask=here + BLOCK_K < K, other=0.0)
        gates += left.to(tl.float32) * value[None, :]
        ups += right.to(tl.float32) * value[None, :]
        tile += BLOCK_K
        mask = inside & (here[None, :] + BLOCK_K < K)
        left = tl.load(tile, mask=mask, other=0.0)
        right = tl.load(tile + N * K, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    g = tl.sum(gates, 1) * scale
    u = tl.sum(ups, 1) * scale
    tl.store(y + rows, (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=rows < N)


@triton.jit
def _tile(
    keys, values, key_scales, value_scales, table, head, first, end,
    D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Keys and values of positions first .. first + BLOCK before the end, and their scales."""
    place = first + tl.arange(0, BLOCK)
    seen = place < end
    slots = tl.load(table + place // PAGE, mask=seen, other=0) * PAGE + place % PAGE
    at_BD = head * D + slots[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(keys + at_BD, mask=seen[:, None], other=0)
    v = tl.load(values + at_BD, mask=seen[:, None], other=0)
    if keys.dtype.element_ty == tl.int8:
        k_scales = tl.load(key_scales + head + slots, mask=seen, other=0.0)
        v_scales = tl.load(value_scales + head + slots, mask=seen, other=0.0)
    else:
        k_scales = tl.full([BLOCK], 1.0, tl.float32)
        v_scales = k_scales
    return k, v, k_scales, v_scales, seen


@triton.jit
def attend_one(
    qkv, cos, sin, keys, values, key_scales, value_scales, table, position, part_o, part_ml, C, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query head and one split of the sequence, for `combine`; split 0 also handles the new token.

    Latency from the queries to the sums decides. So no tensor cores, whose operands would go through shared memory; one
    warp, which waits for no other; and the first keys and values are loaded before the wait: they are of earlier steps,
    and a step starts only after the previous one has ended.
    """
    launch_dependents(PDL)
    h, part = tl.program_id(0), tl.program_id(1)
    kh = h // (H // K)
    at = tl.load(position)  # nothing in this step writes it before the end
    head = kh.to(tl.int64) * C
    size = tl.cdiv(tl.cdiv(at, SPLITS), BLOCK) * BLOCK
    start = part * size
    end = tl.minimum(start + size, at)
    k, v, k_scales, v_scales, seen = _tile(
        keys, values, key_scales, value_scales, table, head, start, end, D, BLOCK, PAGE
    )
    d = tl.arange(0, D)
    half = D // 2
    turn_cos = tl.load(cos + at * half + d % half)
    turn_sin = tl.load(sin + at * half + d % half) * tl.where(d < half, -1.0, 1.0)
    partner = (d + half) % D
    slot = head + tl.load(table + at // PAGE) * PAGE + at % PAGE
    wait_for_previous(PDL)
    q = tl.load(qkv + h * D + d).to(tl.float32) * turn_cos
    q = (q + tl.load(qkv + h * D + partner).to(tl.float32) * turn_sin) * scale
    k_at = qkv + (H + kh) * D
    k_new = tl.load(k_at + d).to(tl.float32) * turn_cos + tl.load(k_at + partner).to(tl.float32) * turn_sin
    v_new = tl.load(qkv + (H + K + kh) * D + d).to(tl.float32)
    first = part == 0
    stores = first & (h % (H // K) == 0)
    if keys.dtype.element_ty == tl.int8:
        k_scale, v_scale = int8_scale(k_new, 0), int8_scale(v_new, 0)
        k_stored, v_stored = to_int8(k_new, k_scale), to_int8(v_new, v_scale)
        k_new, v_new = k_stored.to(tl.float32) * k_scale, v_stored.to(tl.float32) * v_scale
        tl.store(key_scales + slot, k_scale, mask=stores)
        tl.store(value_scales + slot, v_scale, mask=stores)
    else:
        k_stored, v_stored = k_new.to(keys.dtype.element_ty), v_new.to(values.dtype.element_ty)
        k_new = k_stored.to(tl.float32)
    if stores:
        tl.store(keys + slot * D + d, k_stored)
        tl.store(values + slot * D + d, v_stored)
    largest = tl.where(first, tl.sum(q * k_new, 0), -1.0e30)
    weight = tl.where(first, 1.0, 0.0)
    total = tl.where(first, v_new, 0.0)
    for t in range(start, end, BLOCK):
        scores = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], 1) * k_scales, -1.0e30)
        now = tl.maximum(largest, tl.max(scores, 0))
        shrink = tl.exp(largest - now)
        p = tl.exp(scores - now)
        weight = weight * shrink + tl.sum(p, 0)
        total = total * shrink + tl.sum((p * v_scales)[:, None] * v.to(tl.float32), 0)
        largest = now
        k, v, k_scales, v_scales, seen = _tile(
            keys, values, key_scales, value_scales, table, head, t + BLOCK, end, D, BLOCK, PAGE
        )
    here = h * SPLITS + part
    tl.store(part_o + here * D + d, total)
    tl.store(part_ml + here * 2, largest)
    tl.store(part_ml + here * 2 + 1, weight)
