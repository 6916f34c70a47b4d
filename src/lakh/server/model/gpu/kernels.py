"""Triton kernels for steps on the GPU: one new token for each of B sequences, or N tokens of any sequences in tiles.

Shapes: B sequences, W width, F ffn, H query heads, K key/value heads, D head size, C slots of the cache, S splits of a
sequence.

Attention reads keys and values in place through the block table, in S splits at once, and stores the key and value of
the new token. For N tokens (of a prompt, or draft tokens) one kernel stores keys and values and the next reads them; a
tile is a few consecutive tokens of one sequence, which share what is read.

With PDL (programmatic dependent launch) a kernel starts while its predecessor still runs, loads data that no kernel of
the step writes, and only then waits for the predecessor's results.

Compiled on first use for each shape. A single sequence has kernels of its own: matvec_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_norm",
    "attend",
    "attend_tiles",
    "combine",
    "launch_dependents",
    "rotate_store",
    "sample_greedy",
    "swiglu",
    "wait_for_previous",
]


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernels are done and their results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def attend(
    qkv, cos, sin, keys, values, tables, positions, out, part_o, part_ml, C, table_width, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """One sequence, one key/value head, one split of the tokens; split 0 also handles the new token.

    Writes out (B, H*D) if there is one split, else the sums, largest scores and weights of the splits for `combine`.
    """
    GROUP: tl.constexpr = H // K
    M: tl.constexpr = 16  # the smallest side of a tensor-core product; rows beyond GROUP are padding
    b, kh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(positions + b)
    d = tl.arange(0, D)
    m = tl.arange(0, M)
    half = D // 2
    turn_cos = tl.load(cos + at * half + d % half)
    turn_sin = tl.load(sin + at * half + d % half) * tl.where(d < half, -1.0, 1.0)
    partner = (d + half) % D
    row = qkv + b * (H + 2 * K) * D
    q_at = row + (kh * GROUP + m[:, None]) * D
    real = m[:, None] < GROUP
    q = tl.load(q_at + d[None, :], mask=real, other=0.0).to(tl.float32) * turn_cos[None, :]
    q += tl.load(q_at + partner[None, :], mask=real, other=0.0).to(tl.float32) * turn_sin[None, :]
    q *= scale
    largest = tl.full([M], -1.0e30, tl.float32)
    weight = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D], tl.float32)
    head = kh.to(tl.int64) * C * D
    if part == 0:
        k_at = row + (H + kh) * D
        k_new = tl.load(k_at + d).to(tl.float32) * turn_cos + tl.load(k_at + partner).to(tl.float32) * turn_sin
        v_new = tl.load(row + (H + K + kh) * D + d)
        slot = tl.load(tables + b * table_width + at // PAGE) * PAGE + at % PAGE
        k_new = k_new.to(keys.dtype.element_ty)
        tl.store(keys + head + slot * D + d, k_new)
        tl.store(values + head + slot * D + d, v_new.to(values.dtype.element_ty))
        largest = tl.sum(q * k_new.to(tl.float32)[None, :], 1)
        weight += 1.0
        total += v_new.to(tl.float32)[None, :]
    q = q.to(keys.dtype.element_ty)
    size = tl.cdiv(tl.cdiv(at, SPLITS), BLOCK) * BLOCK
    start = part * size
    end = tl.minimum(start + size, at)
    for t in range(start, end, BLOCK):
        place = t + tl.arange(0, BLOCK)
        seen = place < end
        slots = tl.load(tables + b * table_width + place // PAGE, mask=seen, other=0) * PAGE + place % PAGE
        at_BD = head + slots[:, None] * D + d[None, :]
        k = tl.load(keys + at_BD, mask=seen[:, None], other=0.0)
        v = tl.load(values + at_BD, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), out_dtype=tl.float32)
        scores = tl.where(seen[None, :], scores, -1.0e30)
        now = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - now)
        p = tl.exp(scores - now[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, out_dtype=tl.float32)
        largest = now
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
    qkv, cos, sin, positions, slots, q, keys, values, C,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token: rotated queries to q; rotated keys and values to their slot. HEADS: power of two from H + 2 K on."""
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
    value = tl.load(row + d[None, :], mask=real, other=0.0).to(tl.float32)
    partner = tl.load(row + ((d + half) % D)[None, :], mask=real, other=0.0).to(tl.float32)
    turned = value * turn_cos[None, :] + partner * turn_sin[None, :]
    is_query, is_key = h[:, None] < H, (h[:, None] >= H) & (h[:, None] < H + K)
    is_value = (h[:, None] >= H + K) & real
    tl.store(q + n.to(tl.int64) * H * D + h[:, None] * D + d[None, :], turned.to(q.dtype.element_ty), mask=is_query)
    k_at = ((h[:, None] - H).to(tl.int64) * C + slot) * D + d[None, :]
    tl.store(keys + k_at, turned.to(keys.dtype.element_ty), mask=is_key)
    v_at = ((h[:, None] - H - K).to(tl.int64) * C + slot) * D + d[None, :]
    tl.store(values + v_at, value.to(values.dtype.element_ty), mask=is_value)


@triton.jit
def attend_tiles(
    q, keys, values, tables, positions, tile_sequence, tile_first, tile_count, out, part_o, part_ml, C, table_width,
    scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One tile of consecutive tokens of one sequence, one key/value head, one split of the keys; causal.

    ROWS = tokens of a tile x GROUP_ROWS; GROUP_ROWS is the power of two that holds the query heads of one key head.
    A tile of no tokens does nothing.
    """
    GROUP: tl.constexpr = H // K
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
    queries = tl.load(q + place[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    queries = (queries.to(tl.float32) * scale).to(keys.dtype.element_ty)
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    head = kh.to(tl.int64) * C * D
    num_keys = tl.where(count > 0, start_at + count, 0)
    size = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK) * BLOCK
    begin = part * size
    end = tl.minimum(begin + size, num_keys)
    for k0 in range(begin, end, BLOCK):
        at = k0 + tl.arange(0, BLOCK)
        inside = at < end
        slots = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + at % PAGE
        at_BD = head + slots[:, None] * D + d[None, :]
        k = tl.load(keys + at_BD, mask=inside[:, None], other=0.0)
        v = tl.load(values + at_BD, mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k), out_dtype=tl.float32)
        seen = inside[None, :] & (at[None, :] <= start_at + i[:, None])
        scores = tl.where(seen, scores, -1.0e30)
        now = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - now)
        p = tl.where(seen, tl.exp(scores - now[:, None]), 0.0)  # a query that sees none of these keys adds nothing
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, out_dtype=tl.float32)
        largest = now
    if SPLITS == 1:
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * D + d[None, :], result, mask=real[:, None])
    else:
        where = place * SPLITS + part
        tl.store(part_o + where[:, None] * D + d[None, :], total, mask=real[:, None])
        tl.store(part_ml + where * 2, largest, mask=real)
        tl.store(part_ml + where * 2 + 1, weight, mask=real)


@triton.jit
def add_norm(x, delta, norm, y, W, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """x += delta (if ADD); y = rms_norm(x) * norm: one row."""
    cols = tl.arange(0, BLOCK)
    inside = cols < W
    here = tl.program_id(0) * W + cols
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + here, value.to(x.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / W + eps)
    value *= scale * tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + here, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu(both, y, F, BLOCK: tl.constexpr):
    """y = silu(left half) * right half of one token, BLOCK columns at a time."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    g = tl.load(both + row * 2 * F + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + row * 2 * F + F + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * F + cols, (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def sample_greedy(scores, tokens, positions, steps, history, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One sequence: its most likely token (of equals the first) goes to the history and to the next step."""
    wait_for_previous(PDL)
    b = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    for first in range(0, V, BLOCK):
        here = first + cols
        value = tl.load(scores + b * V + here, mask=here < V, other=float("-inf")).to(tl.float32)
        better = value > best
        best = tl.where(better, value, best)
        best_at = tl.where(better, here, best_at)
    token = tl.min(tl.where(best == tl.max(best, 0), best_at, V - 1), 0)
    step = tl.load(steps + b)
    tl.store(history + step * tl.num_programs(0) + b, token)
    tl.store(tokens + b, token)
    tl.store(positions + b, tl.load(positions + b) + 1)
    tl.store(steps + b, step + 1)
