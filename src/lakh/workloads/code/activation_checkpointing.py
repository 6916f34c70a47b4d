"""Activation checkpointing: what a block keeps from its forward pass for its backward pass, and what it recomputes.

    none       keep what autograd keeps: fastest, most memory
    selective  keep attention, its output product and the gate-up product; recompute norms, rotary positions,
               activations and the query/key/value product
    full       keep only the input of a block: a third more FLOPs, least memory
    budget     the compiler chooses what to keep within MEMORY_BUDGET of the default; needs compiled blocks

Measured figures are in docs/how-to/speed.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lakh.errors import UserError

__all__ = ["checkpoint_for"]

MEMORY_BUDGET = 0.6

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}
_SAVED_MATMULS = (1, 2)  # of the four in a block, in order: qkv, output, gate-up, down


def checkpoint_for(mode: str, *, compiled: bool) -> Callable[..., Any] | None:
    """What `ModelOps.checkpoint` is for a mode."""
    if mode == "budget":
        if not compiled:
            raise UserError("train.recompute", "budget needs the compiler", "set train.compile=block")
        torch._functorch.config.activation_memory_budget = MEMORY_BUDGET
    if mode in ("none", "budget"):
        return None
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    return functools.partial(checkpoint, **options)


def _selective_contexts() -> Any:
    """Of one block: a recomputation may stop before the last product, so every block counts from 0."""
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Any:
    """The matrix products of a block run in a fixed order; the forward pass and the recomputation count their own."""
    counts = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            number = counts[context.is_recompute]
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if number in _SAVED_MATMULS else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide
