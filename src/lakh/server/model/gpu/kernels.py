"""Triton kernels of a step on the GPU: norms, gates, greedy sampling, and the launch of dependent kernels.

Shapes: B sequences, W width, F ffn, V ids. Attention is in attention_kernels.py, the products of a single sequence in
matvec_kernels.py. Compiled on first use for each shape.

With PDL (programmatic dependent launch) a kernel starts while its predecessor still runs, loads data that no kernel of
the step writes, and only then waits for the predecessor's results.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_norm", "launch_dependents", "load_sum", "sample_greedy", "swiglu", "wait_for_previous"]


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
def load_sum(pointers, mask, stride, PARTS: tl.constexpr):
    """The sum of PARTS arrays that lie `stride` apart."""
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointers + part * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def add_norm(
    x, delta, norm, y, W, eps, places, ADD: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr = 1,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """x += delta (if ADD; the sum of PARTS parts); y = rms_norm(x) * norm: one row.

    Unless `places` is None, row i of y is that of row places[i], and x stays as it is.
    """
    launch_dependents(PDL)
    cols = tl.arange(0, BLOCK)
    inside = cols < W
    row = tl.program_id(0)
    if places is not None:
        row = tl.load(places + row)
    here = row * W + cols
    gains = tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += load_sum(delta + here, inside, tl.num_programs(0) * W, PARTS)
        if places is None:
            tl.store(x + here, value.to(x.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / W + eps)
    value *= scale * gains
    tl.store(y + tl.program_id(0) * W + cols, value.to(y.dtype.element_ty), mask=inside)


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
