"""Making one rank's model fast on its device: attention kernel, products, recomputation and compilation, in this order.

    block   each block compiled by itself: seconds, works with every cut over ranks; the default on a GPU
    model   all blocks as one graph: fuses across blocks, takes about a minute, one rank only

Names of parameters do not change. Choices come back with their reasons, for the log.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.workloads.code.activation_checkpointing import recompute
from lakh.workloads.code.attention import choose_kernel
from lakh.workloads.code.kernels.fp8 import fp8_linear
from lakh.workloads.code.model import CodeModel, RMSNorm
from lakh.workloads.code.products import choose_products, linear

__all__ = ["BackendChoice", "choose_compile", "speed_up"]


class BackendChoice(NamedTuple):
    what: str
    choice: str
    reason: str


def choose_compile(wanted: str, *, device: str) -> tuple[str, str]:
    """("none", "block" or "model", why)."""
    if wanted != "auto":
        return wanted, "asked for"
    if device == "cuda":
        return "block", "compiles in seconds and is within measurement of the whole model's speed"
    return "none", "on a CPU compiling takes longer than a short run"


def speed_up(
    model: CodeModel,
    *,
    attention: str = "auto",
    recomputation: str = "none",
    compilation: str = "auto",
    kernels: bool = True,
    products: str = "auto",
    tokens: int = 0,
    run_flops: float = 0.0,
    fp8: bool = False,
    device: str,
) -> list[BackendChoice]:
    """Change the model in place; returns what was chosen and why.

    What is chosen by measurement depends on the work of this rank: `tokens` of a micro-batch, `run_flops` in all.
    """
    weight_dtype = next(model.parameters()).dtype
    bf16 = (model.dtype or weight_dtype) == torch.bfloat16
    kernel, kernel_reason = choose_kernel(attention, device=device, bf16=bf16, head_dim=model.spec.head_dim)
    for block in model.each_block():
        block.attention.attend = kernel
    mode, mode_reason = choose_compile(compilation, device=device)
    if device == "cuda" and kernels:
        _use_kernels(model)
    # A compiler makes its own; recomputation is asked for to save memory, of which these take more.
    if device == "cpu" and kernels and (mode, recomputation) == ("none", "none"):
        kernel_reason = _use_cpu_forms(model, attention) or kernel_reason
    shortest_flops = 2.0 * tokens * model.spec.width * model.spec.heads * model.spec.head_dim / model.parts
    measured, measured_reason = choose_products(
        products,
        device=device,
        bf16=bf16,
        recomputation=recomputation,
        shortest_flops=shortest_flops,
        run_flops=run_flops,
    )
    if fp8:
        _use_fp8(model, device)
        measured, measured_reason = False, "products are made in fp8"
    elif measured:
        for block in model.each_block():
            block.attention.product = block.ffn.product = linear
    recompute(model.each_block(), recomputation, compiled=mode != "none")
    if mode != "none":
        _allow_many_shapes()
    if mode == "block":
        for block in model.each_block():
            block.compile(dynamic=False)
    elif mode == "model":
        model.stack = torch.compile(model.stack, dynamic=False)  # type: ignore[method-assign]
    elif mode != "none":
        raise UserError("train.compile", f"{mode!r} is no way to compile", "choose auto, none, block or model")
    name, _, why = kernel_reason.partition(": ")
    return [
        BackendChoice("attention", name, why),
        BackendChoice("products", "by measurement" if measured else "the library's own", measured_reason),
        BackendChoice("compile", mode, mode_reason),
    ]


def _allow_many_shapes() -> None:
    """A block is traced once for training and once for evaluation, with and without something to add, and for each of a
    few paddings of packed documents: more than torch's default of 8 before it gives up and runs eagerly."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def _use_kernels(model: CodeModel) -> None:
    from lakh.workloads.code.kernels import triton as kernels

    def add_norm(x: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return kernels.add_norm(x, delta, norm.read(norm.weight), norm.eps)

    head_dim = model.spec.head_dim
    can_turn = not model.spec.qk_norm and head_dim & (head_dim - 1) == 0  # a head is a power of two of lanes
    for block in model.each_block():
        block.ffn.activate = kernels.swiglu
        block.add_norm = add_norm
        if can_turn:
            block.attention.turn = kernels.turn


def _use_cpu_forms(model: CodeModel, attention: str) -> str:
    """Why attention goes by blocks; nothing where it does not."""
    from lakh.workloads.code.kernels import cpu

    by_blocks = attention == "auto" and cpu.prefers_blocks()
    for block in model.each_block():
        block.ffn.activate = cpu.swiglu
        if by_blocks:
            block.attention.attend = cpu.attend
    return "blocks: faster than torch's own on this CPU, while what they keep is small" if by_blocks else ""


def _use_fp8(model: CodeModel, device: str) -> None:
    spec = model.spec
    sizes = (spec.width, spec.ffn // model.parts, spec.kv_heads * spec.head_dim // model.parts)
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        raise UserError("train.fp8", "this device has no products of 8-bit floats", "set train.fp8 = false")
    if any(size % 16 for size in sizes):
        found = f"needs width, ffn and key heads of a rank in multiples of 16, and they are {sizes}"
        raise UserError("train.fp8", found, "set train.fp8 = false")
    for block in model.each_block():
        block.attention.product = block.ffn.product = fp8_linear
