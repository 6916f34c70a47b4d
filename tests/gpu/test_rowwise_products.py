"""Products of 8-bit floats with a scale for each row: the kernels that round, and the gradients of a block's halves.

Without a GPU, Triton's interpreter can run the kernels, and torch multiplies 8-bit floats on a CPU: TRITON_INTERPRET=1,
where Triton and a NumPy before 2.4 are installed.
"""

import os
from typing import Any

import pytest
import torch
from bench.train.emulated_fp8 import emulated_linear

from lakh.workloads.code.ops import swiglu

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
BF16 = 2**-8
"""bf16 keeps 8 bits of mantissa: results that are rounded once differ by up to this part of their size."""
FAST_SUM = 2 * BF16
"""Tensor cores of Hopper keep fewer bits than float32 in sums of e4m3 products; random numbers differ by 0.0053."""
E4M3_ERROR = 0.03
"""Of normal numbers rounded to 3 bits of mantissa, as a part of their size; e5m2 has twice as much."""
INT8_ERROR = 0.015
"""Of normal numbers whose largest is 6 standard deviations, rounded to steps of a 127th of that."""


@pytest.fixture(autouse=True)
def rounding_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.9) loses the carry of a mantissa that it rounds up to a power of two."""
    if not INTERPRETED:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float
    types = {tl.float8e4nv: (E4M3, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.uint16)}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in types:
            return plain(data, source, target, rounding)
        dtype, bits = types[target]
        values = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.float32)
        return values.to(dtype).view(bits).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(sum(shape))).to(dtype)


def test_rows_are_rounded_to_8_bits_by_scales_of_their_own() -> None:
    from lakh.workloads.code.kernels.eight_bit import triton_rowwise as kernels

    x = normal(700, 1040) * torch.logspace(-3, 3, 700, device=DEVICE).bfloat16()[:, None]
    x[5] = 0
    exact = x.float()
    rows, columns = kernels.largest_of_both(x)
    assert torch.equal(rows, exact.abs().amax(1))
    assert torch.equal(columns, exact.abs().amax(0))
    assert torch.equal(kernels.largest_of_rows(x), rows)
    for dtype, limit in ((E4M3, E4M3_ERROR), (INT8, INT8_ERROR)):
        rounded, transposed, scale, scale_t = kernels.round_both_axes(x, rows, columns, dtype, E4M3)
        assert rounded.dtype == dtype
        error = (rounded.float() * scale - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-9)
        assert error.max() < limit  # small rows keep their bits beside large ones
        assert distance(transposed.float() * scale_t, exact.mT) < E4M3_ERROR
    other = torch.rand(700, 1, device=DEVICE) + 0.5
    product = exact * other
    rounded, transposed, scale, scale_t = kernels.round_gradient(x, rows, other, product.abs().max(), E4M3)
    assert distance(rounded.float() * scale, exact) < E4M3_ERROR
    assert distance((transposed.float() * scale_t).mT, product) < E4M3_ERROR


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize(("tokens", "width"), [(700, 1040), (256, 2048), (130, 5504)])
def test_rows_rounded_where_they_are_computed_have_the_bits_of_separate_kernels(
    tokens: int, width: int, dtype: torch.dtype
) -> None:
    from lakh.workloads.code.kernels import triton
    from lakh.workloads.code.kernels.eight_bit import triton_rowwise, triton_whole_rows

    def require_rounded(y: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> None:
        largest = triton_rowwise.largest_of_both(exact)
        expected, _, expected_scale, _ = triton_rowwise.round_both_axes(exact, *largest, dtype, E4M3)
        assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)

    x = normal(tokens, width) * torch.logspace(-3, 3, tokens, device=DEVICE).bfloat16()[:, None]
    x[5] = 0
    y, scale = triton_whole_rows.round_whole_rows(x, dtype)
    require_rounded(y, scale, x)
    expected = y.float().to(E4M3) if dtype == INT8 else y
    assert torch.equal(triton_whole_rows.transposed(y).view(torch.uint8), expected.view(torch.uint8).mT)

    both = normal(tokens, 2 * width)
    y, scale, inputs = triton_whole_rows.rounded_swiglu(both, dtype)
    require_rounded(y, scale, triton.swiglu(both))
    gate, up = both.float().chunk(2, dim=-1)
    expected = torch.maximum(torch.nn.functional.silu(gate).abs(), up.abs()).amax(1)
    assert torch.allclose(inputs, expected, rtol=1e-5)

    delta, weight = normal(tokens, width), normal(width, dtype=torch.float32)
    total, h = triton.add_norm(x, delta, weight, 1e-5)
    total_again, y, scale = triton_whole_rows.rounded_add_norm(x, delta, weight, 1e-5, dtype)
    assert torch.equal(total_again, total)
    require_rounded(y, scale, h)


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter refuses a mask of add_norm_backward")
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_fused_halves_of_a_block_are_the_separate_operations(dtype: torch.dtype) -> None:
    from lakh.workloads.code.kernels import triton
    from lakh.workloads.code.kernels.eight_bit import rowwise

    shapes = {"y": (256, 128), "o": (256, 128), "x": (256, 256), "norm": (256,), "up": (1280, 256), "down": (256, 640)}
    inputs = [(normal(*shape) * shape[-1] ** -0.5).detach().requires_grad_() for shape in shapes.values()]
    grads = [normal(256, 256) for _ in range(2)]
    y, o, x, norm, gate_up, down = inputs
    fused = rowwise.rowwise_linear_norm_feed_forward(y, o, x, norm, 1e-5, gate_up, down, dtype)
    total, h = triton.add_norm(x, rowwise.rowwise_linear(y, o, dtype), norm, 1e-5)
    apart = total, rowwise.rowwise_feed_forward(h, gate_up, down, dtype)
    found, expected = ((*z, *torch.autograd.grad(z, inputs, grads)) for z in (fused, apart))
    assert all(map(torch.equal, found, expected))
    inputs = [x, grads[0].clone().requires_grad_(), norm, gate_up]
    grads = [normal(256, 256), normal(256, 1280)]
    fused = rowwise.rowwise_norm_linear(x, inputs[1], norm, 1e-5, gate_up, dtype)
    total, h = triton.add_norm(x, inputs[1], norm, 1e-5)
    apart = total, rowwise.rowwise_linear(h, gate_up, dtype)
    found, expected = ((*z, *torch.autograd.grad(z, inputs, grads)) for z in (fused, apart))
    assert all(map(torch.equal, found, expected))


def test_a_gradient_is_rounded_by_bounds_as_well_as_by_its_largest_magnitude() -> None:
    from lakh.workloads.code.kernels.eight_bit import triton_rowwise as kernels
    from lakh.workloads.code.kernels.eight_bit.triton_whole_rows import rounded_swiglu

    both, grad = normal(700, 2 * 352), normal(700, 352)
    y, scale, inputs = rounded_swiglu(both, E4M3)
    assert distance(y.float() * scale, swiglu(both.float())) < E4M3_ERROR
    exact = both.float().requires_grad_()
    (expected,) = torch.autograd.grad(swiglu(exact), exact, grad.float())
    other = torch.rand(700, 1, device=DEVICE) + 0.5
    for slack in (1.0, 4.0):  # e4m3 has a range of 2^15 with all its bits
        bounds = grad.float().abs().amax(1) * inputs * 1.1 * slack
        top = (bounds * other[:, 0]).amax()
        rounded, transposed, scale, scale_t = kernels.rounded_swiglu_backward(grad, both, bounds, other, top, E4M3)
        assert distance(rounded.float() * scale, expected) < E4M3_ERROR
        assert distance((transposed.float() * scale_t).mT, expected * other) < E4M3_ERROR


@pytest.mark.parametrize(("recipe", "dtype"), [("rowwise", E4M3), ("int8_forward", INT8)])
def test_a_product_and_its_gradients_are_those_of_the_emulation(recipe: str, dtype: torch.dtype) -> None:
    from lakh.workloads.code.kernels.eight_bit.rowwise import rowwise_linear

    inputs, grad = [normal(128, 256).requires_grad_(), normal(384, 256).requires_grad_()], normal(128, 384)
    found, emulated = (
        (y, *torch.autograd.grad(y, inputs, grad))
        for y in (rowwise_linear(*inputs, dtype), emulated_linear(recipe)(*inputs))
    )
    limits = (BF16 if dtype == INT8 else FAST_SUM), FAST_SUM, FAST_SUM
    for a, b, limit in zip(found, emulated, limits, strict=True):
        assert distance(a, b) < limit


@pytest.mark.parametrize(
    "sizes", [(128, 256, 512), (130, 96, 80), (1, 16, 16), (700, 2048, 1040), (33_000, 640, 1040)], ids=str
)
def test_a_product_of_integers_is_exact_until_it_is_rounded_to_bf16(sizes: tuple[int, int, int]) -> None:
    from lakh.workloads.code.kernels.eight_bit import triton_int8_product
    from lakh.workloads.code.kernels.eight_bit.int8_product import int8_product

    tokens, inputs, outputs = sizes
    a, b = (
        torch.randint(-127, 128, shape, device=DEVICE, dtype=INT8) for shape in ((tokens, inputs), (outputs, inputs))
    )
    a[0], b[0] = 127, -127  # the largest sum
    scales = [torch.rand(size, 1, device=DEVICE) * 0.01 for size in (tokens, outputs)]
    exact = a.cpu().long() @ b.cpu().long().mT
    expected = (exact.float().to(DEVICE) * scales[0] * scales[1].mT).bfloat16()
    assert torch.equal(int8_product(a, scales[0], b, scales[1]), expected)
    found = torch.empty_like(expected)
    triton_int8_product.int8_product(a, scales[0], b, scales[1], found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("recipe", "dtype"), [("rowwise", E4M3), ("int8_forward", INT8)])
def test_bounds_of_a_gradient_cost_a_feed_forward_nothing(recipe: str, dtype: torch.dtype) -> None:
    """Its gradients are as near to the plain ones as those of an emulation by largest magnitudes."""
    from lakh.workloads.code.kernels.eight_bit.rowwise import rowwise_feed_forward

    inputs = [normal(256, 128), normal(704, 128), normal(128, 352)]
    inputs = [(value * value.shape[-1] ** -0.5).detach().requires_grad_() for value in inputs]
    x, gate_up, down = inputs
    linear, grad = emulated_linear(recipe), normal(256, 128)
    plain = swiglu(x.float() @ gate_up.float().mT) @ down.float().mT
    emulated = linear(swiglu(linear(x, gate_up)), down)
    exact, near, found = (
        torch.autograd.grad(y, inputs, grad.to(y.dtype))
        for y in (plain, emulated, rowwise_feed_forward(*inputs, dtype))
    )
    for a, b, expected in zip(found, near, exact, strict=True):
        assert distance(a, expected) < 1.05 * distance(b, expected)
