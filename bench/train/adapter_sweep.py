"""Settings of the kernels that compute an activation and multiply it by low-rank adapters, at the shapes of lora-1.2b,
beside separate kernels for both. A part of `python -m bench.train.sweep`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

__all__ = ["adapter_kernels"]

TOKENS, FFN, RANK = 8192, 5504, 16
NAMES = "ROWS", "COLUMNS", "num_warps", "num_stages"
GATED = (
    *((16, 128, 4, 4), (16, 128, 4, 3), (32, 64, 4, 4), (16, 64, 4, 4), (32, 128, 4, 4), (64, 128, 8, 4)),
    (16, 256, 4, 3),
)
"""Of `swiglu_with_product`; the first is the one that it has."""
BACKWARD_NAMES = "TOKENS", "COLUMNS", "num_warps", "num_stages"
GATED_BACKWARD = (
    *((32, 64, 4, 3, 6), (32, 64, 4, 2, 6), (32, 64, 4, 3, 4), (16, 64, 4, 4, 9), (16, 64, 4, 3, 9)),
    *((64, 64, 4, 2, 3), (32, 128, 8, 3, 3)),
)
"""Of `swiglu_backward`, and the parts of the tokens, so that an H200 runs all programs at a time."""


def adapter_kernels(tiny: bool) -> None:
    """Medians in microseconds, and the memory that has to move over that time."""
    from lakh.workloads.code.kernels import low_rank, triton, triton_low_rank

    tokens, ffn = (64, 96) if tiny else (TOKENS, FFN)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the latter by Triton's interpreter
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    product, grad, a = normal(tokens, 2 * ffn), normal(tokens, ffn), normal(RANK, ffn)
    low, grad_low = normal(tokens, 2 * RANK), normal(tokens, RANK)
    both, grad_product = normal(tokens, ffn + 64)[:, : ffn + RANK], normal(tokens, 2 * ffn + 64)[:, : 2 * ffn]
    b, starts = [normal(ffn, RANK)] * 2, (0, ffn)
    forward_bytes, backward_bytes = (passes * tokens * ffn * product.element_size() for passes in (3, 5))

    def separate_forward() -> None:
        torch.mm(triton.swiglu(product), a.mT)

    def separate_backward() -> None:
        plain = triton.swiglu_backward(grad, product)
        sums = [*low_rank.sums_of_b(plain, low, b, starts, 0.5), low_rank.sum_of_a(grad, grad_low)]
        triton_low_rank.sums_over_tokens([triton_low_rank.TokenSum(*one) for one in sums])

    _report("activation, then its product", separate_forward, forward_bytes)
    before = {name: getattr(triton_low_rank, name) for name in ("_GATED", "_GATED_BACKWARD", "_GATED_PARTS")}
    try:
        for values in GATED[: 2 if tiny else None]:
            triton_low_rank._GATED = dict(zip(NAMES, values, strict=True))
            with_product = partial(triton_low_rank.swiglu_with_product, product, a.mT, both)
            _report(f"swiglu_with_product {triton_low_rank._GATED}", with_product, forward_bytes)
        _report("gradient of the activation, then its sums", separate_backward, backward_bytes)
        for *backward_values, triton_low_rank._GATED_PARTS in GATED_BACKWARD[: 2 if tiny else None]:
            triton_low_rank._GATED_BACKWARD = settings = dict(zip(BACKWARD_NAMES, backward_values, strict=True))
            arguments = grad, product, grad_product, low, grad_low, starts, 0.5
            with_sums = partial(triton_low_rank.swiglu_backward, *arguments)
            _report(f"swiglu_backward {settings}, {triton_low_rank._GATED_PARTS} parts", with_sums, backward_bytes)
    finally:
        for name, value in before.items():
            setattr(triton_low_rank, name, value)


def _report(name: str, function: Callable[[], object], moved_bytes: int) -> None:
    """Of replays of a CUDA graph: Python's launches take about as long as these kernels."""
    if not torch.cuda.is_available():
        function()
        print(f"{name}: runs")
        return
    from triton.testing import do_bench_cudagraph

    try:
        ms = do_bench_cudagraph(function, return_mode="median")
    except Exception as error:  # noqa: BLE001
        print(f"{name}: {type(error).__name__} {str(error)[:150]}", flush=True)
        return
    print(f"{name}: {ms * 1e3:.1f} us, {moved_bytes / ms / 1e9:.2f} TB/s", flush=True)
