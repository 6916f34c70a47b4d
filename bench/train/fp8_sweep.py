"""Where the time of 8-bit products goes on this GPU: the products of each scaling, and the tiles of the kernels that
round. Parts of `python -m bench.train.sweep`."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["fp8_products", "fp8_tiles", "int8_products"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = {"qkv": (4096, 2048), "o": (2048, 2048), "gate-up": (11008, 2048), "down": (2048, 5504)}
MODES = {
    "tensor, fast sum": ("tensor", True),
    "tensor": ("tensor", False),
    "row, fast sum": ("row", True),
    "row": ("row", False),
    "block": ("block", False),
}
TILES = {
    "_GATED_BACKWARD": (
        *(
            (64, 128, 8),
            (64, 64, 8),
            (128, 32, 8),
            (128, 64, 16),
            (64, 128, 16),
            (32, 128, 8),
            (64, 32, 4),
            (64, 32, 8),
        ),
        *((128, 64, 8), (64, 64, 4), (128, 32, 4), (128, 32, 16), (32, 64, 4), (32, 64, 8)),
    ),
    "_ROUND": ((64, 256, 8), (128, 64, 8), (64, 128, 8), (128, 128, 16), (64, 64, 4), (64, 128, 4), (128, 128, 8)),
    "_SEARCH": ((4, 2048, 8), (1, 2048, 4), (2, 2048, 4), (8, 1024, 8), (4, 1024, 4), (1, 4096, 4)),
    "_SEARCH_BOTH": ((64, 128, 4), (128, 128, 8), (32, 256, 4), (64, 256, 8), (16, 512, 4)),
    "_TRANSPOSE": ((128, 128, 4), (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 8), (256, 64, 4), (64, 256, 4)),
}
"""Rows, columns and warps that are tried for each setting of kernels/eight_bit/triton_rowwise.py and
triton_whole_rows.py."""
INT8_SETTINGS = tuple(itertools.product((3, 4), (4, 8, 16, 32)))
"""Stages and rows of tiles that run at the same time, of the product of 8-bit integers in kernels/cuda/."""
LANES = (8, 16, 32, 64)
"""Numbers of a row that a thread of the latter holds."""


def _operand(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(20).to(dtype)


def _scales(x: Tensor, kind: str) -> Tensor:
    rows, columns = x.shape
    shape = {"tensor": (), "row": (rows, 1), "block": (columns // 128, rows)}[kind]
    scales = torch.ones(shape, device="cuda")
    return scales.t() if kind == "block" else scales


def fp8_products(timed_ms: Callable[..., float], tiny: bool) -> None:
    """Milliseconds of forward, input gradient and weight gradient of a block of 1.2B parameters, for each scaling."""
    tokens = 4096 if tiny else 65536
    for name, (outputs, inputs) in SHAPES.items():
        x, x_t = _operand(tokens, inputs, E4M3), _operand(inputs, tokens, E4M3)
        w, w_t = _operand(outputs, inputs, E4M3), _operand(inputs, outputs, E4M3)
        for grad_dtype in (E5M2, E4M3):
            g, g_t = _operand(tokens, outputs, grad_dtype), _operand(outputs, tokens, grad_dtype)
            for what, (a, b) in {"fwd": (x, w), "dx": (g, w_t), "dw": (g_t, x_t)}.items():
                times = []
                for mode, (kind, fast) in MODES.items():
                    if kind == "block" and a.dtype != E4M3:
                        continue
                    scales = (_scales(a, kind), _scales(b, kind).t())
                    ms = timed_ms(
                        lambda a=a, b=b, s=scales, f=fast: torch._scaled_mm(
                            a, b.t(), scale_a=s[0], scale_b=s[1], out_dtype=torch.bfloat16, use_fast_accum=f
                        )
                    )
                    times.append(f"{mode} {ms:.3f}")
                print(f"fp8 {name} {what} {a.dtype}: {'; '.join(times)} ms", flush=True)


def int8_products(timed_ms: Callable[..., float], tiny: bool) -> None:
    """Milliseconds of the forward products of a block in 8-bit integers, for each setting, beside e4m3."""
    from lakh.workloads.code.kernels.cuda import int8_product as kernel

    tokens, sums, e4m3_sum = 4096 if tiny else 65536, dict.fromkeys(INT8_SETTINGS, 0.0), 0.0
    products = {}
    for setting in INT8_SETTINGS:
        kernel.SETTINGS.update(zip(("STAGES", "GROUP"), setting, strict=True))
        products[setting] = kernel.Int8Product(torch.device("cuda"))
    for name, (outputs, inputs) in SHAPES.items():
        x, w = (_integers(n, inputs) for n in (tokens, outputs))
        scales = torch.ones(tokens, 1, device="cuda"), torch.ones(outputs, 1, device="cuda")
        y = x.new_empty(tokens, outputs, dtype=torch.bfloat16)
        x8, w8 = _operand(tokens, inputs, E4M3), _operand(outputs, inputs, E4M3)
        e4m3_ms = timed_ms(
            lambda a=x8, b=w8, s=scales: torch._scaled_mm(
                a, b.t(), scale_a=s[0], scale_b=s[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
        e4m3_sum += e4m3_ms
        times = []
        for setting, product in products.items():
            ms = timed_ms(lambda p=product, a=x, b=w, s=scales, y=y: p(a, s[0], b, s[1], y))
            times.append((ms, setting))
            sums[setting] += ms
        print(
            f"int8 {name}: e4m3 {e4m3_ms:.3f}; {', '.join(f'{t} {ms:.3f}' for ms, t in sorted(times))} ms", flush=True
        )
    best = sorted(sums.items(), key=lambda item: item[1])
    print(f"int8 sum: e4m3 {e4m3_sum:.3f}; {', '.join(f'{t} {ms:.3f}' for t, ms in best)} ms", flush=True)


def _integers(rows: int, columns: int) -> Tensor:
    """Normal numbers, the largest of them about 127, as of rows that are rounded by their own scales."""
    return (torch.randn(rows, columns, device="cuda") * 36).round().clamp(-127, 127).to(torch.int8)


def fp8_tiles(timed_ms: Callable[..., float], tiny: bool, device: str = "cuda") -> None:
    """Milliseconds of the row-wise kernels for each tile, the fastest first."""
    from lakh.workloads.code.kernels.eight_bit import triton_rowwise as tiled
    from lakh.workloads.code.kernels.eight_bit import triton_whole_rows as whole

    N, K, F = (128, 96, 80) if tiny else (65536, 2048, 5504)
    x, both, grad = (torch.randn(N, size, device=device, dtype=torch.bfloat16) for size in (K, 2 * F, F))
    weight = torch.randn(2 * F, K, device=device, dtype=torch.bfloat16)
    bounds, other = torch.full((N,), 1e3, device=device), torch.ones(N, 1, device=device)
    top, rows, bytes_ = bounds.amax(), tiled.largest_of_rows(x), whole.round_whole_rows(grad, E4M3)[0]
    calls: list[tuple[Any, str, Callable[[], Any]]] = [
        (tiled, "_GATED_BACKWARD", lambda: tiled.rounded_swiglu_backward(grad, both, bounds, other, top, E4M3)),
        (tiled, "_ROUND", lambda: tiled.round_gradient(x, rows, other, top, E4M3)),
        (tiled, "_SEARCH", lambda: tiled.largest_of_rows(x)),
        (tiled, "_SEARCH_BOTH", lambda: tiled.largest_of_both(weight)),
        (whole, "_TRANSPOSE", lambda: whole.transposed(bytes_)),
    ]
    for module, name, call in calls:
        found = _times_of_tiles(timed_ms, getattr(module, name), TILES[name], call)
        print(f"fp8 {name}: {', '.join(f'{tile} {ms:.3f}' for ms, tile in found)} ms", flush=True)
    before = whole._LANES
    for name, call in {
        "rounded_swiglu": lambda: whole.rounded_swiglu(both, E4M3),
        "round_whole_rows": lambda: whole.round_whole_rows(x, E4M3),
    }.items():
        times = []
        for whole._LANES in LANES:
            times.append((timed_ms(call), whole._LANES))
        whole._LANES = before
        print(f"fp8 {name}: {', '.join(f'{lanes} lanes {ms:.3f}' for ms, lanes in sorted(times))} ms", flush=True)


def _times_of_tiles(
    timed_ms: Callable[..., float], setting: dict[str, int], tiles: Iterable[tuple[int, int, int]], call: Any
) -> list[tuple[float, tuple[int, int, int]]]:
    before, found = dict(setting), []
    for tile in tiles:
        setting.update(zip(("ROWS", "COLUMNS", "num_warps"), tile, strict=True))
        try:
            found.append((timed_ms(call), tile))
        except Exception as error:  # noqa: BLE001
            print(f"fp8 tile {tile}: {type(error).__name__} {str(error)[:100]}", flush=True)
    setting.update(before)
    return sorted(found)
