"""What a block keeps from its forward pass for its backward pass, and what it computes again.

    none       keep what autograd keeps: fastest, most memory
    selective  keep the products that are dear to compute again (attention, its output, gate and up) and recompute the
               cheap rest: norms, rotary positions, activations, and the query/key/value product
    full       keep a block's input alone: a third more FLOPs, least memory
    budget     let the compiler choose what to keep within BUDGET of what it would keep; needs compiled blocks

Measured figures stand in docs/how-to/speed.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lakh.errors import UserError

__all__ = ["MODES", "recompute"]

MODES = ("none", "selective", "full", "budget")
BUDGET = 0.6

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}
_KEPT_PRODUCTS = (1, 2)  # of a block's four, in order: qkv, output, gate-up, down


def recompute(blocks: Iterable[nn.Module], mode: str, *, compiled: bool) -> None:
    """Make the blocks recompute in place. Names of parameters do not change."""
    if mode == "none":
        return
    if mode == "budget":
        if not compiled:
            raise UserError("train.recompute", "budget is the compiler's choice", "set train.compile=block")
        torch._functorch.config.activation_memory_budget = BUDGET
        return
    context = functools.partial(create_selective_checkpoint_contexts, _policy()) if mode == "selective" else None
    for block in blocks:
        block.forward = _checkpointed(block.forward, context)


def _checkpointed(forward: Any, context: Any) -> Any:
    kwargs = {} if context is None else {"context_fn": context}

    @functools.wraps(forward)
    def call(x: Tensor, delta: Tensor | None, *args: Any) -> Any:
        x = x if delta is None else x + delta  # outside: a block's one input is kept, not two
        return checkpoint(forward, x, None, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


def _policy() -> Any:
    """A block's products come in a fixed order; each pass, forward and recomputation, counts its own."""
    counts = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _PRODUCTS:
            number = counts[context.is_recompute] % 4
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if number in _KEPT_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide
