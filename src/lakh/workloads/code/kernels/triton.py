"""Four Triton kernels for NVIDIA GPUs, each one pass over its data where the compiler needs more or slower passes.

    add_norm        residual stream and delta -> their sum and its norm; backward with the gradient of the weight
    swiglu          gate-up product -> silu(gate) * up; backward into one gradient for the fused product
    split_rotary    query-key-value product -> rotated queries and keys, and values; backward into one gradient
    cross_entropy_  logits -> losses, and their gradient in place of the logits: memory is read once and written once

Measured on an H200 for 131,072 tokens of a 162M model (2026-11-15): the compiler's backward of `split_rotary` moved
1.2 GB in 2.5 ms, a quarter of the memory's speed, because it writes three interleaved parts by one kernel with masks.

Import only where a GPU is used. The plain forms are in ops.py and loss.py; tests/gpu compares them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.objective import Objective

__all__ = ["add_norm", "cross_entropy_", "split_rotary", "swiglu"]

_COLUMNS = 1024
_PROGRAMS = 1056  # eight for each multiprocessor of an H100 or H200
_STAGES = 3  # pipelined loads of add_norm_backward: 146 us, with one 164 (H200, 32,768 x 2,048)
_SHARED_BYTES = 160 << 10  # of a multiprocessor's memory that these loads may take


# --- add_norm -------------------------------------------------------------------------------------------------


@triton.jit
def _add_norm(x, delta, weight, total, y, W, Y_STRIDE, EPS, COLUMNS: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = number * W
    at = tl.arange(0, COLUMNS)
    inside = at < W
    both = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + row + at, rounded, mask=inside)
    both = rounded.to(tl.float32)  # the norm is of the rounded sum, which the next block reads
    scale = tl.rsqrt(tl.sum(both * both, 0) / W + EPS)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + number * Y_STRIDE + at, both * scale * w, mask=inside)


@triton.jit
def _add_norm_backward(
    grad_total, grad_y, total, weight, grad_x, copy, grad_weight, rows, ROWS, W, COPY_STRIDE, EPS,
    COLUMNS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr, MEASURES: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Each program handles many rows and, with SUMS, sums its part of the weight's gradient."""
    at = tl.arange(0, COLUMNS)
    inside = at < W
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    for turn in tl.range(TURNS, num_stages=STAGES):
        number = turn * tl.num_programs(0) + tl.program_id(0)
        row = number.to(tl.int64) * W
        there = inside & (number < ROWS)
        x = tl.load(total + row + at, mask=there, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + row + at, mask=there, other=0.0).to(tl.float32)
        passed = tl.load(grad_total + row + at, mask=there, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / W + EPS)
        normed = x * scale
        if SUMS:
            weight_sum += grad * normed
        grad *= w
        common = tl.sum(grad * normed, 0) / W
        result = (passed + scale * (grad - normed * common)).to(grad_x.dtype.element_ty)
        tl.store(grad_x + row + at, result, mask=there)
        if COPIES:
            tl.store(copy + number.to(tl.int64) * COPY_STRIDE + at, result, mask=there)
        if MEASURES:
            largest = tl.max(tl.where(there, tl.abs(result.to(tl.float32)), 0.0), 0)
            tl.store(rows + number, largest, mask=number < ROWS)
    if SUMS:
        tl.store(grad_weight + tl.program_id(0) * W + at, weight_sum, mask=inside)


def add_norm_into(y_NW: Tensor, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x + delta, and writes its norm to y, whose rows may be apart."""
    x, delta = x.contiguous(), delta.contiguous()
    total = torch.empty_like(x)
    rows, width = y_NW.shape
    columns = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, delta, weight, total, y_NW, width, y_NW.stride(0), eps,
        COLUMNS=columns, num_warps=max(1, min(16, columns // 256)),
    )  # fmt: skip
    return total


@torch.library.custom_op("lakh::add_norm", mutates_args=())
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its root-mean-square norm along the last dim."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return add_norm_into(y.view(-1, y.shape[-1]), x, delta, weight, eps), y


@add_norm.register_fake
def _(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _launch_add_norm_backward(
    grad_total: Tensor,
    grad_y: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    *,
    copy: Tensor | None = None,
    is_trained: bool = True,
    measures: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`copy`, a matrix whose rows may be apart, gets the gradient of x too."""
    grad_total, grad_y = grad_total.contiguous(), grad_y.contiguous()
    width = total.shape[-1]
    num_rows = total.numel() // width
    grad_x = torch.empty_like(total)
    programs = min(num_rows, _PROGRAMS)
    sums = total.new_empty((programs, width) if is_trained else (0,), dtype=torch.float32)
    rows = total.new_empty(num_rows if measures else 0, dtype=torch.float32)
    columns = triton.next_power_of_2(width)
    row_bytes = columns * (total.element_size() + grad_y.element_size() + grad_total.element_size())
    stages = _STAGES if _STAGES * row_bytes <= _SHARED_BYTES else 1
    _add_norm_backward[(programs,)](
        grad_total, grad_y, total, weight, grad_x, grad_x if copy is None else copy, sums, rows, num_rows, width,
        0 if copy is None else copy.stride(0), eps,
        COLUMNS=columns, TURNS=triton.cdiv(num_rows, programs), STAGES=stages, SUMS=is_trained, MEASURES=measures,
        COPIES=copy is not None, num_warps=max(1, min(16, columns // 256)),
    )  # fmt: skip
    return grad_x, sums, rows


@torch.library.custom_op("lakh::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    grad_x, sums, _ = _launch_add_norm_backward(grad_total, grad_y, total, weight, eps)
    return grad_x, sums.sum(0).to(weight.dtype)


@add_norm_backward.register_fake
def _(grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def add_norm_backward_with_copy(
    copy: Tensor | None, grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """The gradient of x and delta for a weight that is not trained; `copy`, whose rows may be apart, gets it too."""
    return _launch_add_norm_backward(grad_total, grad_y, total, weight, eps, copy=copy, is_trained=False)[0]


@torch.library.custom_op("lakh::add_norm_backward_frozen", mutates_args=())
def add_norm_backward_frozen(grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gradient of x and delta, for a weight that is not trained."""
    return _launch_add_norm_backward(grad_total, grad_y, total, weight, eps, is_trained=False)[0]


@add_norm_backward_frozen.register_fake
def _(grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float) -> Tensor:
    return total.new_empty(total.shape)


@torch.library.custom_op("lakh::measured_add_norm_backward", mutates_args=())
def measured_add_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (and delta) and of the weight, and the largest magnitude of each row of the first."""
    grad_x, sums, rows = _launch_add_norm_backward(grad_total, grad_y, total, weight, eps, measures=True)
    return grad_x, sums.sum(0).to(weight.dtype), rows


@measured_add_norm_backward.register_fake
def _(grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, eps: float) -> Any:
    rows = total.new_empty(total.numel() // total.shape[-1], dtype=torch.float32)
    return total.new_empty(total.shape), weight.new_empty(weight.shape), rows


def _add_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0], inputs[2])
    ctx.eps = inputs[3]


def _add_norm_gradient(ctx: Any, grad_total: Tensor, grad_y: Tensor) -> Any:
    arguments = (grad_total, grad_y, *ctx.saved_tensors, ctx.eps)
    if not ctx.needs_input_grad[2]:
        grad_x = add_norm_backward_frozen(*arguments)
        return grad_x, grad_x, None, None
    grad_x, grad_weight = add_norm_backward(*arguments)
    return grad_x, grad_x, grad_weight, None


add_norm.register_autograd(_add_norm_gradient, setup_context=_add_norm_setup)


# --- swiglu: x_NF2 holds gate and up side by side -------------------------------------------------------------


@triton.jit
def _swiglu(x, y, F, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < F
    gate = tl.load(x + row * 2 * F + at, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + at, mask=inside).to(tl.float32)
    tl.store(y + row * F + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(grad_y, x, grad_x, F, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < F
    grad = tl.load(grad_y + row * F + at, mask=inside).to(tl.float32)
    gate = tl.load(x + row * 2 * F + at, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + at, mask=inside).to(tl.float32)
    open_ = tl.sigmoid(gate)
    tl.store(grad_x + row * 2 * F + at, grad * up * open_ * (1 + gate * (1 - open_)), mask=inside)
    tl.store(grad_x + row * 2 * F + F + at, grad * gate * open_, mask=inside)


@torch.library.custom_op("lakh::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, where the last dim of x holds gate and up side by side."""
    half = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], half)
    _swiglu[(y.numel() // half, triton.cdiv(half, _COLUMNS))](x.contiguous(), y, half, COLUMNS=_COLUMNS)
    return y


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("lakh::swiglu_backward", mutates_args=())
def swiglu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    half = x.shape[-1] // 2
    grad_x = torch.empty_like(x)
    grid = (x.numel() // x.shape[-1], triton.cdiv(half, _COLUMNS))
    _swiglu_backward[grid](grad_y, x, grad_x, half, COLUMNS=_COLUMNS)
    return grad_x


@swiglu_backward.register_fake
def _(grad_y: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


swiglu.register_autograd(
    lambda ctx, grad_y: swiglu_backward(grad_y, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


# --- split_rotary: x_BTX holds H query heads, K key heads and K value heads of size D side by side ----------


@triton.jit
def _rotate_heads(source, target, cos, sin, HEADS: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr):
    half: tl.constexpr = D // 2
    head, i = tl.arange(0, LANES)[:, None], tl.arange(0, half)[None, :]
    at, inside = head * D + i, (head < HEADS) & (i < half)
    left = tl.load(source + at, mask=inside).to(tl.float32)
    right = tl.load(source + at + half, mask=inside).to(tl.float32)
    tl.store(target + at, left * cos - right * sin, mask=inside)
    tl.store(target + at + half, right * cos + left * sin, mask=inside)


@triton.jit
def _copy_heads(source, target, HEADS: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr):
    head, i = tl.arange(0, LANES)[:, None], tl.arange(0, D)[None, :]
    at, inside = head * D + i, (head < HEADS) & (i < D)
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def _split_rotary(
    x, q, k, v, cos, sin, PLACES,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, H_LANES: tl.constexpr, K_LANES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D // 2)[None, :]
    place = token % PLACES
    c = tl.load(cos + place * D + i)
    s = tl.load(sin + place * D + i)
    x += token * (H + 2 * K) * D
    q += token * H * D
    k += token * K * D
    v += token * K * D
    if BACK:
        _rotate_heads(q, x, c, -s, H, H_LANES, D)
        _rotate_heads(k, x + H * D, c, -s, K, K_LANES, D)
        _copy_heads(v, x + (H + K) * D, K, K_LANES, D)
    else:
        _rotate_heads(x, q, c, s, H, H_LANES, D)
        _rotate_heads(x + H * D, k, c, s, K, K_LANES, D)
        _copy_heads(x + (H + K) * D, v, K, K_LANES, D)


def _launch_split_rotary(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    B, T, H, D = q.shape
    K = k.shape[2]
    lanes = [triton.next_power_of_2(heads) for heads in (H, K)]
    _split_rotary[(B * T,)](
        x, q, k, v, cos, sin, cos.numel() // D, H=H, K=K, D=D, H_LANES=lanes[0], K_LANES=lanes[1], BACK=back
    )  # fmt: skip


@torch.library.custom_op("lakh::split_rotary", mutates_args=())
def split_rotary(x_BTX: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q_BTHD and k_BTKD rotated, and v_BTKD. cos and sin: 1 or B, T, 1, D in float32."""
    B, T, X = x_BTX.shape
    D = X // (heads + 2 * kv_heads)
    q, k, v = (x_BTX.new_empty(B, T, count, D) for count in (heads, kv_heads, kv_heads))
    _launch_split_rotary(x_BTX.contiguous(), q, k, v, cos.contiguous(), sin.contiguous(), back=False)
    return q, k, v


@split_rotary.register_fake
def _(x_BTX: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, T, X = x_BTX.shape
    D = X // (heads + 2 * kv_heads)
    q, k, v = (x_BTX.new_empty(B, T, count, D) for count in (heads, kv_heads, kv_heads))
    return q, k, v


@torch.library.custom_op("lakh::split_rotary_backward", mutates_args=())
def split_rotary_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, T, H, D = q.shape
    grad_x = q.new_empty(B, T, (H + 2 * k.shape[2]) * D)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    _launch_split_rotary(grad_x, q, k, v, cos.contiguous(), sin.contiguous(), back=True)
    return grad_x


@split_rotary_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], (q.shape[2] + 2 * k.shape[2]) * q.shape[3])


def _split_rotary_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _split_rotary_gradient(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:
    return split_rotary_backward(grad_q, grad_k, grad_v, *ctx.saved_tensors), None, None, None, None


split_rotary.register_autograd(_split_rotary_gradient, setup_context=_split_rotary_setup)


# --- cross_entropy_ -------------------------------------------------------------------------------------------


@triton.jit
def _cross_entropy(
    logits, targets, scale, losses, Z_LOSS, SMOOTHING, IGNORE,
    V: tl.constexpr, COLUMNS: tl.constexpr, SMOOTHS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    at = tl.arange(0, COLUMNS)
    target = tl.load(targets + row)
    weight = tl.where(target == IGNORE, 0.0, tl.load(scale))
    right = tl.load(logits + tl.where(target == IGNORE, 0, target)).to(tl.float32)
    LOWEST: tl.constexpr = -1e30  # finite: a lane that never sees a logit must not subtract infinities
    top = tl.full((COLUMNS,), LOWEST, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    plain = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, V, COLUMNS):  # each lane keeps its own maximum and sum
        x = tl.load(logits + first + at, mask=first + at < V, other=LOWEST).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        if SMOOTHS:
            plain += tl.where(first + at < V, x, 0.0)
    peak = tl.max(top, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(top - peak), 0)) + peak
    even = SMOOTHING / V
    aim = (1.0 - SMOOTHING) * right  # the logits, weighted by the smoothed targets
    if SMOOTHS:
        aim += even * tl.sum(plain, 0)
    tl.store(losses + row, (log_sum - aim + Z_LOSS * log_sum * log_sum) * weight)
    factor = (1.0 + 2.0 * Z_LOSS * log_sum) * weight
    for first in range(0, V, COLUMNS):  # the row is still in the cache
        x = tl.load(logits + first + at, mask=first + at < V, other=LOWEST).to(tl.float32)
        aimed = tl.where(first + at == target, 1.0 - SMOOTHING + even, even)
        grad = tl.exp(x - log_sum) * factor - aimed * weight
        tl.store(logits + first + at, grad, mask=first + at < V)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Scaled sum of the losses, and the gradient, which overwrites the logits."""
    rows, columns = logits.shape
    assert logits.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    size = min(4096, triton.next_power_of_2(columns))
    _cross_entropy[(rows,)](
        logits, targets.contiguous(), scale, losses, objective.z_loss, objective.label_smoothing, IGNORED,
        V=columns, COLUMNS=size, SMOOTHS=objective.label_smoothing > 0, num_warps=8,
    )  # fmt: skip
    return losses.sum(), logits
