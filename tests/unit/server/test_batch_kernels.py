"""The CUDA kernels of decode batches on a CPU (tests/cuda_emulation.h): they compute what torch computes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.cuda_emulation import address, compiled, needs_compiler

from lakh.server.model.gpu.batch import attention, product
from lakh.workloads.code.kernels.cuda import nvrtc

FOLDER = Path(product.__file__).parent
pytestmark = pytest.mark.timeout(300)
PRODUCT = """
extern "C" void run_product(int blocks, const char* x, const char* w, void* y, int tokens) {
  run(blocks, THREADS, [=] { batch_product(x, w, y, tokens); });
}
"""
ATTENTION = """
extern "C" void run_attention(int blocks, const float* qkv, const float* cos, const float* sin, u16* keys, u16* values,
                              const int* tables, const int* positions, u16* out, int slots, int table_width) {
  run(blocks, 32 * WARPS, [=] {
    batch_attention(qkv, cos, sin, keys, values, tables, positions, out, slots, table_width);
  });
}
"""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@needs_compiler
@pytest.mark.parametrize(
    ("output", "size", "tokens", "tile"),
    [
        (product.Output.PARTS, (200, 640), (64, 64), product.ProductTile(128, 4, 1)),
        (product.Output.PARTS, (100, 704), (16, 13), product.ProductTile(64, 3, 2)),
        (product.Output.BF16, (72, 448), (32, 32), product.ProductTile(48, 5, 1)),
        (product.Output.SWIGLU, (208, 832), (8, 2), product.ProductTile(96, 4, 1)),
    ],
    ids=lambda value: str(value),
)
def test_a_product_equals_that_of_torch(
    tmp_path: Path,
    output: product.Output,
    size: tuple[int, int],
    tokens: tuple[int, int],
    tile: product.ProductTile,
) -> None:
    (rows, columns), (padded, count) = size, tokens
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(count, columns, generator=generator).bfloat16()
    w = torch.randn(rows, columns, generator=generator).bfloat16() * 0.1
    source, defines = (FOLDER / "product.cu").read_text(), product.defines(rows, columns, padded, output, tile)
    library = compiled(tmp_path, source, defines, PRODUCT)
    is_parts = output == product.Output.PARTS
    shape = (tile.splits, count, rows) if is_parts else (count, rows // (2 if output == product.Output.SWIGLU else 1))
    y = torch.full(shape, torch.nan, dtype=torch.float32 if is_parts else torch.bfloat16)
    library.run_product(tile.blocks(rows), address(x), address(w), address(y), count)
    expected = x.double() @ w.double().T
    if output == product.Output.SWIGLU:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    found = y.sum(0) if is_parts else y
    assert relative_error(found, expected) < (1e-6 if is_parts else 4e-3)  # bf16 rounds by 2^-9 at most


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "size", "parts"), [(4, 2, 128, 3), (3, 1, 64, 1)])
def test_attention_equals_that_of_torch(tmp_path: Path, heads: int, kv_heads: int, size: int, parts: int) -> None:
    positions = torch.tensor([0, 37, 165], dtype=torch.int32)  # no page, part of one, and more than the warps have
    blocks, page, width, total = 36, 16, 12, (heads + 2 * kv_heads) * size
    generator = torch.Generator().manual_seed(size)
    qkv = torch.randn(parts, 3, total, generator=generator)
    keys, values = (torch.randn(kv_heads, blocks * page, size, generator=generator).bfloat16() for _ in range(2))
    tables = torch.randperm(blocks, generator=generator).int().view(3, width)
    angles = torch.arange(200)[:, None] * 10000 ** (-torch.arange(size // 2) * 2 / size)
    cos, sin, out = angles.cos().contiguous(), angles.sin().contiguous(), torch.zeros(3, heads * size).bfloat16()
    before = keys.double(), values.double()
    source, defines = (FOLDER / "attention.cu").read_text(), attention.defines(heads, kv_heads, size, parts)
    library = compiled(tmp_path, source, defines, ATTENTION)
    tensors = [qkv, cos, sin, keys, values, tables, positions, out]
    library.run_attention(3 * kv_heads, *map(address, tensors), keys.shape[1], width)
    for row, at in enumerate(positions.tolist()):
        q, k, v = qkv.double().sum(0)[row].unflatten(0, (-1, size)).split([heads, kv_heads, kv_heads])
        left, right = torch.cat([q, k]).chunk(2, dim=-1)
        turn_cos, turn_sin = cos[at].double(), sin[at].double()
        turned = torch.cat([left * turn_cos - right * turn_sin, right * turn_cos + left * turn_sin], dim=-1)
        q, k = turned.split([heads, kv_heads])
        slots = (tables[row].long()[:, None] * page + torch.arange(page)).flatten()[: at + 1]
        own_keys, own_values = (cached[:, slots].clone() for cached in before)
        own_keys[:, at], own_values[:, at] = k, v
        assert relative_error(keys[:, slots], own_keys) < 4e-3  # the new key is stored, the others stay
        assert relative_error(values[:, slots], own_values) < 4e-3
        group = heads // kv_heads
        scores = torch.einsum("hd,htd->ht", q, own_keys.repeat_interleave(group, 0)) / math.sqrt(size)
        expected = torch.einsum("ht,htd->hd", scores.softmax(-1), own_values.repeat_interleave(group, 0))
        assert relative_error(out[row].unflatten(0, (heads, size)), expected) < 6e-3


@pytest.mark.parametrize("tokens", product.TOKENS)
@pytest.mark.parametrize("output", list(product.Output))
def test_the_sources_compile_for_hopper(output: product.Output, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    try:
        nvrtc._nvrtc()
    except nvrtc.CudaCompileError as error:
        pytest.skip(f"{error} (pip install nvidia-cuda-nvrtc)")
    tile = product.tile_for(2048, 5504, output, 132)
    texts = {
        "product": product.defines(2048, 5504, tokens, output, tile),
        "attention": attention.defines(16, 8, 128, tile.splits),
    }
    for kernel, defines in texts.items():
        text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + product.source(kernel)
        assert nvrtc.compile_cubin(text, kernel, (9, 0), "a")[:4] == b"\x7fELF"
