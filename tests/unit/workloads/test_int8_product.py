"""The CUDA kernel of products of 8-bit integers on a CPU (tests/cuda_emulation.h): it computes what torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cuda_emulation import address, compiled, needs_compiler

from lakh.workloads.code.kernels.cuda import int8_product, nvrtc

pytestmark = pytest.mark.timeout(300)
RUN = """
extern "C" void run_product(int blocks, const char* a, const char* b, const float* a_scale, const float* b_scale,
                            u16* y, int N, int M, int K) {
  const TensorMap a_map = tiles(a, N, K, ROWS), b_map = tiles(b, M, K, LOADED);
  run(blocks, THREADS, [=] { int8_product(a_map, b_map, a_scale, b_scale, y, N, M, K); }, CLUSTER);
}
"""


@needs_compiler
def test_a_product_equals_that_of_torch(tmp_path: Path) -> None:
    defines = {**int8_product.defines(), "STAGES": 3, "GROUP": 1}
    library = compiled(tmp_path, Path(int8_product.__file__).with_suffix(".cu").read_text(), defines, RUN)
    # Two pairs of tiles with more steps than stages; four pairs of tiles for two clusters.
    for (N, M, K), clusters in (((200, 272, 464), 1), ((300, 272, 144), 2)):
        generator = torch.Generator().manual_seed(N)
        a, b = (torch.randint(-127, 128, (n, K), generator=generator, dtype=torch.int8) for n in (N, M))
        a_scale, b_scale = (torch.rand(n, 1, generator=generator) * 0.01 for n in (N, M))
        y = torch.full((N, M), torch.nan, dtype=torch.bfloat16)
        library.run_product(int8_product.CLUSTER * clusters, *map(address, (a, b, a_scale, b_scale, y)), N, M, K)
        expected = (a.long() @ b.long().mT).float() * a_scale * b_scale.mT
        assert torch.equal(y, expected.bfloat16())


def test_the_source_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    try:
        nvrtc._nvrtc()
    except nvrtc.CudaCompileError as error:
        pytest.skip(f"{error} (pip install nvidia-cuda-nvrtc)")
    macros = "".join(f"#define {name} {value}\n" for name, value in int8_product.defines().items())
    assert nvrtc.compile_cubin(macros + int8_product.source(), "int8_product", (9, 0), "a")[:4] == b"\x7fELF"
