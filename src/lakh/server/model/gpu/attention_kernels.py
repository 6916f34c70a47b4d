"""Triton kernels of attention over the paged KV cache: one new token for each of B sequences, or N tokens of any
sequences in tiles.

Shapes: B sequences, H query heads, K key/value heads, D head size, C slots of the cache, S splits of a sequence.

Attention reads keys and values in place through the block table, in S splits at once, and stores the key and value of
the new token. For N tokens (of a prompt, or draft tokens) one kernel stores keys and values and the next reads them; a
tile is a few consecutive tokens of one sequence, which share what is read.

The cache has the type of activations, or int8 with a scale for each slot and head: scores are multiplied by the scales
of keys, and the weights of values by theirs, so the numbers themselves go to tensor cores as they are.

Compiled on first use for each shape. A single sequence has a kernel of its own in matvec_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lakh.server.model.gpu.kernels import launch_dependents, load_sum, wait_for_previous

__all__ = ["attend", "attend_tiles", "combine", "int8_scale", "rotate_store", "to_int8"]


@triton.jit
def int8_scale(x, axis: tl.constexpr):
    """Of numbers along an axis: the largest becomes 127."""
    return tl.max(tl.abs(x), axis) / 127


@triton.jit
def to_int8(x, scale):
    return tl.floor(x / tl.maximum(scale, 1.0e-30) + 0.5).to(tl.int8)


@triton.jit
def slots_of(table, place, end, PAGE: tl.constexpr):
    """The slots of these tokens of a sequence; 0 from the end on."""
    return tl.load(table + place // PAGE, mask=place < end, other=0) * PAGE + place % PAGE


@triton.jit
def prefetch(pointers):
    """Ask for these lines in the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def attend(
    qkv, cos, sin, keys, values, key_scales, value_scales, tables, positions, out, part_o, part_ml, C, table_width,
    scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, PARTS: tl.constexpr = 1, PDL: tl.constexpr = False, AHEAD: tl.constexpr = 0,
):  # fmt: skip
    """One sequence, one key/value head, one split of the tokens; split 0 also handles the new token.

    qkv is the sum of PARTS parts. Writes out (B, H*D) if there is one split, else the sums, largest scores and weights
    of the splits for `combine`. With PDL the first AHEAD tokens are on their way to the L2 cache before the wait.
    """
    launch_dependents(PDL)
    GROUP: tl.constexpr = H // K
    M: tl.constexpr = 16  # the smallest side of a tensor-core product; rows beyond GROUP are padding
    INT8: tl.constexpr = keys.dtype.element_ty == tl.int8
    b, kh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(positions + b)
    d = tl.arange(0, D)
    m = tl.arange(0, M)
    half = D // 2
    turn_cos = tl.load(cos + at * half + d % half)
    turn_sin = tl.load(sin + at * half + d % half) * tl.where(d < half, -1.0, 1.0)
    partner = (d + half) % D
    table = tables + b * table_width
    head = kh.to(tl.int64) * C
    size = tl.cdiv(tl.cdiv(at, SPLITS), BLOCK) * BLOCK
    start = part * size
    end = tl.minimum(start + size, at)
    if PDL and AHEAD:  # nothing in this step writes the keys and values of earlier tokens
        LINES: tl.constexpr = max(D * keys.dtype.element_ty.primitive_bitwidth // 1024, 1)
        ahead = start + tl.arange(0, AHEAD)
        line = slots_of(table, ahead, end, PAGE)[:, None] * D + (tl.arange(0, LINES) * (D // LINES))[None, :]
        prefetch(keys + head * D + line)
        prefetch(values + head * D + line)
    wait_for_previous(PDL)
    row = qkv + b * (H + 2 * K) * D
    stride = tl.num_programs(0) * (H + 2 * K) * D
    q_at = row + (kh * GROUP + m[:, None]) * D
    real = m[:, None] < GROUP
    q = load_sum(q_at + d[None, :], real, stride, PARTS) * turn_cos[None, :]
    q += load_sum(q_at + partner[None, :], real, stride, PARTS) * turn_sin[None, :]
    q *= scale
    largest = tl.full([M], -1.0e30, tl.float32)
    weight = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D], tl.float32)
    if part == 0:
        k_at = row + (H + kh) * D
        k_new = load_sum(k_at + d, d < D, stride, PARTS) * turn_cos
        k_new += load_sum(k_at + partner, d < D, stride, PARTS) * turn_sin
        v_new = load_sum(row + (H + K + kh) * D + d, d < D, stride, PARTS)
        slot = tl.load(table + at // PAGE) * PAGE + at % PAGE
        if INT8:
            k_scale, v_scale = int8_scale(k_new, 0), int8_scale(v_new, 0)
            k_stored, v_stored = to_int8(k_new, k_scale), to_int8(v_new, v_scale)
            tl.store(key_scales + head + slot, k_scale)
            tl.store(value_scales + head + slot, v_scale)
            k_new, v_new = k_stored.to(tl.float32) * k_scale, v_stored.to(tl.float32) * v_scale
        else:
            k_stored, v_stored = k_new.to(keys.dtype.element_ty), v_new.to(values.dtype.element_ty)
            k_new, v_new = k_stored.to(tl.float32), v_stored.to(tl.float32)
        tl.store(keys + head * D + slot * D + d, k_stored)
        tl.store(values + head * D + slot * D + d, v_stored)
        largest = tl.sum(q * k_new[None, :], 1)
        weight += 1.0
        total += v_new[None, :]
    q = q.to(out.dtype.element_ty)
    if INT8:
        # One round ahead: of the variants measured on an H200 the fastest for int8; for bf16 it is slower.
        slots = slots_of(table, start + tl.arange(0, BLOCK), end, PAGE)
    for t in range(start, end, BLOCK):
        place = t + tl.arange(0, BLOCK)
        seen = place < end
        if not INT8:
            slots = slots_of(table, place, end, PAGE)
        at_BD = head * D + slots[:, None] * D + d[None, :]
        k = tl.load(keys + at_BD, mask=seen[:, None], other=0)
        v = tl.load(values + at_BD, mask=seen[:, None], other=0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), out_dtype=tl.float32)
        if INT8:
            scores *= tl.load(key_scales + head + slots, mask=seen, other=0.0)[None, :]
        scores = tl.where(seen[None, :], scores, -1.0e30)
        now = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - now)
        p = tl.exp(scores - now[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        if INT8:
            p *= tl.load(value_scales + head + slots, mask=seen, other=0.0)[None, :]
        total = total * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), out_dtype=tl.float32)
        largest = now
        if INT8:
            slots = slots_of(table, place + BLOCK, end, PAGE)
    h = kh * GROUP + m
    mine = m < GROUP
    if SPLITS == 1:
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + (b * H + h[:, None]) * D + d[None, :], result, mask=mine[:, None])
    else:
        place = (b * H + h) * SPLITS + part
        tl.store(part_o + place[:, None] * D + d[None, :], total, mask=mine[:, None])
        tl.store(part_ml + place * 2, largest, mask=mine)
        tl.store(part_ml + place * 2 + 1, weight, mask=mine)


@triton.jit
def combine(part_o, part_ml, out, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Combine the splits of one sequence and one query head, weighted by their largest scores."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    here = tl.program_id(0)
    d, s = tl.arange(0, D), tl.arange(0, SPLITS)
    largest = tl.load(part_ml + (here * SPLITS + s) * 2)
    share = tl.exp(largest - tl.max(largest, 0))
    weight = tl.sum(share * tl.load(part_ml + (here * SPLITS + s) * 2 + 1), 0)
    parts = tl.load(part_o + (here * SPLITS + s[:, None]) * D + d[None, :])
    tl.store(out + here * D + d, (tl.sum(parts * share[:, None], 0) / weight).to(out.dtype.element_ty))


@triton.jit
def rotate_store(
    qkv, cos, sin, positions, slots, q, keys, values, key_scales, value_scales, C,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr = 1,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One token: rotated queries to q; rotated keys and values to their slot. HEADS: power of two from H + 2 K on.

    qkv is the sum of PARTS parts.
    """
    launch_dependents(PDL)
    n = tl.program_id(0)
    at = tl.load(positions + n)
    slot = tl.load(slots + n).to(tl.int64)
    d = tl.arange(0, D)
    h = tl.arange(0, HEADS)
    half = D // 2
    turn_cos = tl.load(cos + at * half + d % half)
    turn_sin = tl.load(sin + at * half + d % half) * tl.where(d < half, -1.0, 1.0)
    row = qkv + n.to(tl.int64) * (H + 2 * K) * D + h[:, None] * D
    real = h[:, None] < H + 2 * K
    stride = tl.num_programs(0) * (H + 2 * K) * D
    wait_for_previous(PDL)
    value = load_sum(row + d[None, :], real, stride, PARTS)
    partner = load_sum(row + ((d + half) % D)[None, :], real, stride, PARTS)
    turned = value * turn_cos[None, :] + partner * turn_sin[None, :]
    is_query, is_key = h[:, None] < H, (h[:, None] >= H) & (h[:, None] < H + K)
    is_value = (h[:, None] >= H + K) & real
    tl.store(q + n.to(tl.int64) * H * D + h[:, None] * D + d[None, :], turned.to(q.dtype.element_ty), mask=is_query)
    k_slot, v_slot = (h - H).to(tl.int64) * C + slot, (h - H - K).to(tl.int64) * C + slot
    if keys.dtype.element_ty == tl.int8:
        stored = tl.where(is_key, turned, value)
        scales = int8_scale(stored, 1)
        tl.store(key_scales + k_slot, scales, mask=(h >= H) & (h < H + K))
        tl.store(value_scales + v_slot, scales, mask=(h >= H + K) & (h < H + 2 * K))
        k_stored = to_int8(stored, scales[:, None])
        v_stored = k_stored
    else:
        k_stored, v_stored = turned.to(keys.dtype.element_ty), value.to(values.dtype.element_ty)
    tl.store(keys + k_slot[:, None] * D + d[None, :], k_stored, mask=is_key)
    tl.store(values + v_slot[:, None] * D + d[None, :], v_stored, mask=is_value)


@triton.jit
def attend_tiles(
    q, keys, values, key_scales, value_scales, tables, positions, tile_sequence, tile_first, tile_count, out, part_o,
    part_ml, C, table_width, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One tile of consecutive tokens of one sequence, one key/value head, one split of the keys; causal.

    ROWS = tokens of a tile x GROUP_ROWS; GROUP_ROWS is the power of two that holds the query heads of one key head.
    A tile of no tokens does nothing.
    """
    launch_dependents(PDL)
    GROUP: tl.constexpr = H // K
    INT8: tl.constexpr = keys.dtype.element_ty == tl.int8
    t, kh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tile_count + t)
    first = tl.load(tile_first + t)
    table = tables + tl.load(tile_sequence + t) * table_width
    start_at = tl.load(positions + first)
    d = tl.arange(0, D)
    m = tl.arange(0, ROWS)
    i, g = m // GROUP_ROWS, m % GROUP_ROWS
    real = (i < count) & (g < GROUP)
    place = (first + i).to(tl.int64) * H + kh * GROUP + g
    wait_for_previous(PDL)
    queries = tl.load(q + place[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    queries = (queries.to(tl.float32) * scale).to(q.dtype.element_ty)
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    head = kh.to(tl.int64) * C
    num_keys = tl.where(count > 0, start_at + count, 0)
    size = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK) * BLOCK
    begin = part * size
    end = tl.minimum(begin + size, num_keys)
    for k0 in range(begin, end, BLOCK):
        at = k0 + tl.arange(0, BLOCK)
        inside = at < end
        slots = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + at % PAGE
        at_BD = head * D + slots[:, None] * D + d[None, :]
        k = tl.load(keys + at_BD, mask=inside[:, None], other=0)
        v = tl.load(values + at_BD, mask=inside[:, None], other=0)
        scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), out_dtype=tl.float32)
        if INT8:
            scores *= tl.load(key_scales + head + slots, mask=inside, other=0.0)[None, :]
        seen = inside[None, :] & (at[None, :] <= start_at + i[:, None])
        scores = tl.where(seen, scores, -1.0e30)
        now = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - now)
        p = tl.where(seen, tl.exp(scores - now[:, None]), 0.0)  # a query that sees none of these keys adds nothing
        weight = weight * shrink + tl.sum(p, 1)
        if INT8:
            p *= tl.load(value_scales + head + slots, mask=inside, other=0.0)[None, :]
        total = total * shrink[:, None] + tl.dot(p.to(queries.dtype), v.to(queries.dtype), out_dtype=tl.float32)
        largest = now
    if SPLITS == 1:
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * D + d[None, :], result, mask=real[:, None])
    else:
        where = place * SPLITS + part
        tl.store(part_o + where[:, None] * D + d[None, :], total, mask=real[:, None])
        tl.store(part_ml + where * 2, largest, mask=real)
        tl.store(part_ml + where * 2 + 1, weight, mask=real)
