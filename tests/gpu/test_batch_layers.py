"""Decode batches on Hopper GPUs: products, attention and layers of gpu/batch give what torch computes in float32."""

from __future__ import annotations

import pytest
import torch

from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU"), pytest.mark.timeout(300)]
DEVICE = torch.device("cuda")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("tokens", [2, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "output", "splits"),
    [(384, 256, "PARTS", 1), (200, 704, "PARTS", 4), (320, 576, "BF16", 1), (2 * 328, 512, "SWIGLU", 1)],
)
def test_a_product_is_that_of_float32(tokens: int, rows: int, columns: int, output: str, splits: int) -> None:
    from lakh.server.model.gpu.batch.product import BatchProduct, Output, ProductTile

    torch.manual_seed(tokens)
    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    w = torch.randn(rows, columns, device=DEVICE).bfloat16() * 0.05
    expected = x.float() @ w.float().T
    if output == "SWIGLU":
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    for tile in (ProductTile(64, 3, splits), ProductTile(128, 6, splits), ProductTile(96, 8, splits)):
        product = BatchProduct(rows, columns, tokens, Output[output], tile, DEVICE)
        found = product(x, w)
        found = found.sum(0) if output == "PARTS" else found
        # Parts are float32; the others round to bf16 once, 2^-9 at most.
        assert relative_error(found, expected) < (1e-5 if output == "PARTS" else 2e-3)


def make(heads: int, kv_heads: int, head_dim: int) -> tuple[InferenceModel, InferenceModel, Model]:
    """The same weights in bf16 and in float32."""
    spec = Model(layers=2, width=heads * head_dim, heads=heads, kv_heads=kv_heads, ffn=448, vocab=320, context=1024)
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {
        name: (tensor.detach() * (4 if tensor.dim() > 1 else 1)).bfloat16()
        for name, tensor in model.state_dict().items()
    }
    networks = [InferenceModel(spec, weights, spec.vocab, DEVICE, precision) for precision in ("bf16", "f32")]
    return networks[0], networks[1], spec


def caches(spec: Model) -> tuple[PagedCache, PagedCache, PagedCache]:
    bf16 = [PagedCache(spec, 64 * 40 + 1, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    return bf16[0], bf16[1], PagedCache(spec, 64 * 40 + 1, device=DEVICE, dtype=torch.float32)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers of gpu/batch are always the fastest; the list names the tokens of those that were timed."""
    from lakh.server.model.gpu.batch.layers import BatchLayers
    from lakh.server.model.gpu.graphs import GraphCapture

    used: list[str] = []

    def time_s(_self: object, step: object, _prepare: object = None) -> float:
        parts = [*getattr(step, "args", ())]
        found = any(isinstance(part, BatchLayers) for part in parts)
        used.extend(type(part).__name__ for part in parts)
        return 0.0 if found else 1.0

    monkeypatch.setattr(GraphCapture, "time_s", time_s)
    return used


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 2, 128), (12, 4, 64), (16, 8, 128)])
@pytest.mark.parametrize("rows", [5, 16, 33])
def test_a_step_has_no_larger_error_than_cublas(
    rows: int, heads: int, kv_heads: int, head_dim: int, forced: list[str]
) -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, exact, spec = make(heads, kv_heads, head_dim)
    captured, plain, wide = caches(spec)
    lengths = [(1 + 97 * row) % 600 for row in range(rows)]  # of none, part of and many pages
    blocks = [list(range(row * 40, row * 40 + 40)) for row in range(rows)]
    prompts = [SequenceChunk(ids(length, row), 0, blocks[row], 0) for row, length in enumerate(lengths)]
    for model, cache in ((network, captured), (network, plain), (exact, wide)):
        for prompt in prompts:
            if prompt.tokens:
                model.forward([prompt], cache)
    tokens = ids(rows, 3)
    decoder = Decoder(network, captured)
    for step in range(2):  # the second reads what the first stored
        segments = [SequenceChunk([tokens[row]], lengths[row] + step, blocks[row]) for row in range(rows)]
        starts = [length + step for length in lengths]
        with torch.inference_mode():
            drawn, found = decoder.run(tokens, starts, blocks, 1)
        expected, theirs = exact.forward(segments, wide), network.forward(segments, plain)
        assert relative_error(found, expected) < 1.2 * relative_error(theirs, expected) + 1e-3
        assert drawn == [found.argmax(-1).tolist()]
        tokens = drawn[0]
    assert "BatchLayers" in forced


@pytest.mark.parametrize("counts", [(3,), (9, 1, 4), (20, 5), (40, 1, 1, 16)])
def test_tokens_of_several_sequences_have_no_larger_error_than_cublas(
    counts: tuple[int, ...], forced: list[str]
) -> None:
    from lakh.server.model.gpu.prefill import PrefillGraphs

    network, exact, spec = make(4, 2, 64)
    captured, plain, wide = caches(spec)
    graphs = PrefillGraphs(network, captured)
    blocks = [list(range(row * 40, row * 40 + 40)) for row in range(len(counts))]
    for start in (0, 50):
        chunks = []
        for row, count in enumerate(counts):
            many = 50 if start == 0 else count
            chunks.append(SequenceChunk(ids(many, row + start), start, blocks[row], min(count, many)))
        for part in [[chunk] for chunk in chunks] if start == 0 else [chunks]:
            expected, theirs = exact.forward(part, wide), network.forward(part, plain)
            assert graphs.fits(part)
            found = graphs.launch(part).logits.clone()
            assert found.shape == expected.shape
            assert relative_error(found, expected) < 1.2 * relative_error(theirs, expected) + 1e-3
    assert "BatchLayers" in forced


def test_several_steps_in_a_row_are_those_of_single_steps(forced: list[str]) -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, _, spec = make(16, 8, 128)
    cache = caches(spec)[0]
    decoder = Decoder(network, cache)
    blocks = [list(range(row * 40, row * 40 + 40)) for row in range(64)]
    with torch.inference_mode():
        together, _ = decoder.run([7] * 64, list(range(64)), blocks, 12)
        tokens, single = [7] * 64, []
        for step in range(12):
            tokens = decoder.run(tokens, [row + step for row in range(64)], blocks, 1)[0][0]
            single.append(tokens)
    assert together == single
    assert "BatchAttention" in forced
