"""Weights of 8 and 4 bits on the GPU: formats, products, and steps of a network beside float32 on the same numbers.

Without a GPU, Triton's interpreter can run the kernels: TRITON_INTERPRET=1, where Triton is installed.
"""

import os

import pytest
import torch

from lakh.server.model.gpu import quantized
from lakh.server.model.gpu.quantized import Fp8Matrix, Int4Matrix
from lakh.server.model.inference import InferenceModel, Precision, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU or later"
)
# Layers, width, heads, key/value heads, ffn, ids: columns that no number of warps divides, few rows of a chunk, ids
# that 16 does not divide.
SHAPES = [
    (2, 2048, 16, 8, 5504, 32064),
    (3, 576, 9, 3, 1536, 1001),
    (2, 256, 8, 1, 320, 320),
    (2, 1024, 8, 4, 14336, 512),
]


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("columns", [64, 320, 2048])
def test_int4_has_the_layout_that_it_documents(columns: int) -> None:
    weight = random(16, columns)
    weight[3, :32] = 0
    (packed,) = quantized.quantize(weight, 4)
    assert packed.shape == (16, quantized.row_bytes(columns, 4))
    assert packed.shape[1] % 16 == 0
    back = quantized.dequantize(Int4Matrix(packed, columns), torch.float32)
    error = ((back - weight).unflatten(1, (-1, 32)).square().mean(-1) / weight.unflatten(1, (-1, 32)).var(-1)).sqrt()
    assert error[torch.isfinite(error)].max() < 0.2
    assert not back[3, :32].any()
    words = packed[:, : columns // 2].contiguous().view(torch.int32)
    scales = packed[:, columns // 2 :].contiguous().view(torch.float16)
    number = (int(words[5, 1]) >> 24 & 15) - 8  # column 8 + 5
    assert back[5, 13] == number * float(scales[5, 0])


@pytest.mark.parametrize("num", [1, 5, 20] if INTERPRETED else [1, 5, 20, 64, 100, 300])
@pytest.mark.parametrize("columns", [64, 320])
def test_int4_products_equal_those_with_the_dequantized_weight(num: int, columns: int) -> None:
    from lakh.server.model.gpu import quantized_kernels

    weight = Int4Matrix(*quantized.quantize(random(50, columns), 4), columns)
    x = random(num, columns, seed=1).to(DTYPE)
    dense = quantized.dequantize(weight, torch.float32)
    torch.testing.assert_close(quantized_kernels.dequantize_int4(weight.values, columns, torch.float32), dense)
    expected = x.float() @ dense.T
    found = quantized.linear(x, weight)
    assert found.dtype == DTYPE
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_fp8_rounds_each_row_with_a_scale_of_its_own() -> None:
    weight = random(32, 256) * torch.logspace(-4, 4, 32, device=DEVICE)[:, None]
    matrix = Fp8Matrix(*quantized.quantize(weight, 8))
    back = quantized.dequantize(matrix, torch.float32)
    assert ((back - weight).norm(dim=1) / weight.norm(dim=1)).max() < 0.04


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU: the interpreter has no e4m3")
@pytest.mark.parametrize("num", [1, 7, 64, 300])
def test_fp8_products_are_near_those_with_the_dequantized_weight(num: int) -> None:
    matrix = Fp8Matrix(*quantized.quantize(random(96, 576), 8))
    x = random(num, 576, seed=1).to(DTYPE) * torch.logspace(-3, 3, num, device=DEVICE)[:, None].to(DTYPE)
    expected = x.float() @ quantized.dequantize(matrix, torch.float32).T
    found = quantized.linear(x, matrix).float()
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.06, (
        "tokens are rounded to 4 significant bits"
    )


def make(shape: tuple[int, ...], precision: Precision, gain: float = 6) -> tuple[InferenceModel, InferenceModel]:
    """The quantized network, and float32 with the numbers that it holds. A large gain gives sharp attention, which
    amplifies the rounding of tokens."""
    layers, width, heads, kv_heads, ffn, num_ids = shape
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    spec = Model(**sizes, vocab=-(-num_ids // 64) * 64, context=1024)  # type: ignore[arg-type]
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {
        name: (tensor.detach() * (gain if tensor.dim() > 1 else 1)).bfloat16()
        for name, tensor in model.state_dict().items()
    }
    network = InferenceModel(spec, weights, num_ids, DEVICE, precision)
    exact = InferenceModel(spec, weights, num_ids, DEVICE, "f32")
    for layer in range(layers):
        for name in ("qkv", "o", "gate_up", "down"):
            exact.matrix(name, layer).copy_(quantized.dequantize(network.matrix(name, layer), torch.float32))
    exact.head = quantized.dequantize(network.head_matrix(), torch.float32)[:num_ids].contiguous()
    return network, exact


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@needs_hopper
@pytest.mark.parametrize("precision", ["fp8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_megakernel_equals_float32_on_the_same_numbers(shape: tuple[int, ...], precision: Precision) -> None:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.megakernel import Megakernel, MegakernelPlan

    network, exact = make(shape, precision)
    caches = [PagedCache(network.spec, 65, device=DEVICE, dtype=one.dtype) for one in (network, exact)]
    plan = Megakernel.plan(network)
    assert isinstance(plan, MegakernelPlan), plan
    megakernel = Megakernel(network, caches[0], plan)
    decoder = Decoder(network, caches[0], use_graphs=False)
    blocks = list(reversed(range(64)))
    prompt = torch.randint(0, network.num_ids, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    for length in (0, 1, 70, 300):
        if length:
            exact.forward([SequenceChunk(prompt[:length], 0, blocks, 0)], caches[1])
        caches[0].keys_LKCD.copy_(caches[1].keys_LKCD), caches[0].values_LKCD.copy_(caches[1].values_LKCD)
        expected = exact.forward([SequenceChunk([7], length, blocks, 1)], caches[1])
        batch = decoder.load_batch([7], [length], [blocks])
        megakernel(batch)
        off = relative(batch.logits, expected)
        assert off < 5e-2, f"after {length} tokens: {off:.1e}"  # bf16 between layers; of torch's it has the same
        assert batch.history[0, 0] == batch.tokens[0] == batch.logits.argmax()


@needs_hopper
@pytest.mark.parametrize(("precision", "limit"), [("fp8", 0.15), ("int4", 0.05)])
@torch.inference_mode()
def test_captured_steps_and_prompts_are_near_float32(precision: Precision, limit: float) -> None:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.prefill import PrefillGraphs

    network, exact = make(SHAPES[1], precision, gain=2)
    plain, wide = (PagedCache(one.spec, 65, device=DEVICE, dtype=one.dtype) for one in (network, exact))
    decoder, prefill = Decoder(network, plain), PrefillGraphs(network, plain)
    prompts = [torch.randint(0, network.num_ids, (40 + row,)).tolist() for row in range(3)]
    tables = [list(range(row * 8, row * 8 + 8)) for row in range(3)]
    chunks = [SequenceChunk(prompt, 0, table, 1) for prompt, table in zip(prompts, tables, strict=True)]
    assert relative(prefill.launch(chunks).logits, exact.forward(chunks, wide)) < limit
    chunks = [SequenceChunk([7], len(prompt), table, 1) for prompt, table in zip(prompts, tables, strict=True)]
    lengths = [len(prompt) for prompt in prompts]
    assert relative(decoder.run([7] * 3, lengths, tables, 1)[1], exact.forward(chunks, wide)) < limit
    one = decoder.run([7], lengths[:1], tables[:1], 1)[1]
    assert relative(one, exact.forward(chunks[:1], wide)) < limit
