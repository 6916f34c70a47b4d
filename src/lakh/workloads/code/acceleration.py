"""Make the model fast on one device: attention kernel, fused kernels, fp8, activation checkpointing, compilation.

    block   each block compiled by itself: takes seconds, works with every kind of parallelism; default on a GPU
    model   all blocks as one graph: fuses across blocks, takes about a minute, one rank only

Names of parameters do not change. Each choice comes with its reason, for the log.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.spec import Model, Training
from lakh.workloads.code import ops as plain
from lakh.workloads.code.activation_checkpointing import checkpoint_for
from lakh.workloads.code.attention import AttentionVariant, choose_kernel, variant_attention
from lakh.workloads.code.fp8_check import bf16_layers, check_fp8
from lakh.workloads.code.kernels.eight_bit.blockwise import blockwise_linear
from lakh.workloads.code.kernels.eight_bit.rowwise import (
    rowwise_feed_forward,
    rowwise_linear,
    rowwise_linear_norm_feed_forward,
    rowwise_norm_linear,
)
from lakh.workloads.code.kernels.eight_bit.tensorwise import fp8_feed_forward, fp8_linear
from lakh.workloads.code.ops import ModelOps

__all__ = ["BackendChoice", "choose_compile", "choose_ops"]


_int8 = partial(partial, forward=torch.int8)

FP8_PRODUCTS: dict[str, tuple[Any, Any]] = {
    "tensorwise": (fp8_linear, fp8_feed_forward),
    "rowwise": (rowwise_linear, rowwise_feed_forward),
    "int8_forward": (_int8(rowwise_linear), _int8(rowwise_feed_forward)),
    "blockwise": (blockwise_linear, None),
}
"""By `train.fp8_recipe`: a product, and a feed-forward in one operation."""
FUSED_FP8: dict[str, tuple[Any, Any]] = {
    "rowwise": (rowwise_norm_linear, rowwise_linear_norm_feed_forward),
    "int8_forward": (_int8(rowwise_norm_linear), _int8(rowwise_linear_norm_feed_forward)),
}
"""By `train.fp8_recipe`: the halves of a block, each as one operation."""


class BackendChoice(NamedTuple):
    what: str
    choice: str
    reason: str


def choose_compile(wanted: str, *, device: str) -> tuple[str, str]:
    """("none", "block" or "model", the reason)."""
    if wanted not in ("auto", "none", "block", "model"):
        raise UserError("train.compile", f"unknown mode {wanted!r}", "choose auto, none, block or model")
    if wanted != "auto":
        return wanted, "requested"
    if device == "cuda":
        return "block", "compiles in seconds and is as fast as the whole model within measurement error"
    return "none", "on a CPU compiling takes longer than a short run"


def choose_ops(
    spec: Model, settings: Training, *, kernels: bool = True, bf16: bool, tensor_parallel: int = 1, device: str
) -> tuple[ModelOps, str, list[BackendChoice]]:
    """The operations for one device, what to compile, and both choices."""
    mode, mode_reason = choose_compile(settings.compile, device=device)
    head_dim = spec.head_dim + spec.rope_dim
    kernel, name, reason = choose_kernel(settings.attention, device=device, bf16=bf16, head_dim=head_dim)
    ops = ModelOps(attention=kernel, checkpoint=checkpoint_for(settings.recompute, compiled=mode != "none"))
    ops = replace(ops, variant_attention=partial(variant_attention, plain=kernel))
    if device == "cuda" and kernels:
        ops = _with_triton(ops, spec)
    # The compiler fuses these itself; activation checkpointing saves memory, and these take more.
    if device == "cpu" and kernels and (mode, settings.recompute) == ("none", "none"):
        from lakh.workloads.code.kernels import cpu

        ops = replace(ops, activation=cpu.swiglu)
        if settings.attention == "auto" and cpu.prefers_blocked_attention():
            ops = replace(ops, attention=cpu.blocked_attention)
            name, reason = "blocked", "faster than torch's kernel on this CPU while the saved probabilities are few"
    if settings.fp8:
        layers = bf16_layers(spec, settings)
        _require_fp8_device(settings.fp8_recipe, device)
        check_fp8(spec, settings, tensor_parallel, bf16=bf16)
        linear, feed_forward = FP8_PRODUCTS[settings.fp8_recipe]
        ops = replace(ops, linear=linear, fused_feed_forward=feed_forward, bf16_layers=layers)
        if settings.fp8_recipe in FUSED_FP8 and kernels and tensor_parallel == 1:
            norm_linear, linear_norm_feed_forward = FUSED_FP8[settings.fp8_recipe]
            ops = replace(ops, fused_norm_linear=norm_linear, fused_linear_norm_feed_forward=linear_norm_feed_forward)
    if spec.experts is not None and settings.recompute == "selective":
        raise UserError("train.recompute", "selective counts the products of a dense block", "choose full or none")
    num_variants = sum(AttentionVariant.of(spec, layer) is not None for layer in range(spec.layers))
    if num_variants:
        reason += f"; {num_variants} of {spec.layers} layers have a window or bounded scores, by masks where needed"
    return ops, mode, [BackendChoice("attention", name, reason), BackendChoice("compile", mode, mode_reason)]


def _with_triton(ops: ModelOps, spec: Model) -> ModelOps:
    from lakh.workloads.code.kernels import triton

    def norm_add(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return plain.norm_add(x, None, weight, eps) if delta is None else triton.add_norm(x, delta, weight, eps)

    def split_rotary(qkv: Tensor, rope: plain.Rope, heads: int, kv_heads: int, *_: object) -> Any:
        return triton.split_rotary(qkv, *rope, heads, kv_heads)

    ops = replace(ops, activation=triton.swiglu, norm_add=norm_add)
    is_power_of_two = spec.head_dim & (spec.head_dim - 1) == 0  # a head is a power of two of lanes
    is_plain = is_power_of_two and not spec.qk_norm and spec.rotary_size is None and not spec.has_query_tables
    return replace(ops, split_rotary=split_rotary) if is_plain else ops


def _require_fp8_device(recipe: str, device: str) -> None:
    oldest = (8, 9) if recipe == "tensorwise" else (9, 0)
    if device != "cuda" or torch.cuda.get_device_capability() < oldest:
        found = f"the recipe {recipe} needs a GPU of compute capability {oldest[0]}.{oldest[1]}"
        raise UserError("train.fp8", found, "set train.fp8 = false")
