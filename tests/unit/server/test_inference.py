"""InferenceModel computes the logits of the trained model."""

from __future__ import annotations

import pytest
import torch

from lakh.errors import UserError
from lakh.server.model.cpu import native, packed
from lakh.server.model.inference import InferenceModel, Precision, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

CPU = torch.device("cpu")
needs_library = pytest.mark.skipif(native.open_library() is None, reason="the native engine library is not built")
# Of scores that spread over tens: float32 sums in another order; 8 bits of weights and activations; 8 of bfloat16; 4 of
# weights.
TOLERANCE: dict[Precision, float] = {"f32": 2e-4, "int8": 1.0, "bf16": 1.0, "int4": 12.0}


def make(precision: Precision, *, qk_norm: bool) -> tuple[CodeModel, InferenceModel, PagedCache]:
    spec = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=300, context=96, qk_norm=qk_norm)
    model = CodeModel(spec).requires_grad_(False)
    init_weights(model, 1)
    numbers = torch.Generator().manual_seed(2)
    for parameter in model.parameters():  # no norm is left at 1: one that is skipped or mixed up shows
        parameter.mul_(8 if parameter.dim() > 1 else torch.rand(parameter.shape, generator=numbers) + 0.5)
    network = InferenceModel(spec, model.state_dict(), spec.vocab, CPU, precision)
    return model, network, PagedCache(spec, 8, device=CPU, dtype=network.dtype)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bfloat16 products says so
@pytest.mark.parametrize(
    "precision", ["f32", "bf16", *(pytest.param(name, marks=needs_library) for name in ("int8", "int4"))]
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_prompt_in_chunks_and_tokens_after_it_score_as_in_training(precision: Precision, qk_norm: bool) -> None:
    model, network, cache = make(precision, qk_norm=qk_norm)
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(3))
    expected = model(ids[None])[0]
    table = [3, 1, 5]
    at, worst = 0, 0.0
    for count in (20, 12, 3, 1, 1, 3):
        scores = network.forward([SequenceChunk(ids[at : at + count].tolist(), at, table, count)], cache)
        worst = max(worst, (scores.float() - expected[at : at + count]).abs().max().item())
        at += count
    assert at == len(ids)
    assert worst < TOLERANCE[precision]


def test_swapped_weights_include_the_norms_of_queries_and_keys() -> None:
    _, network, cache = make("f32", qk_norm=True)
    ids = list(range(20, 32))
    before = network.forward([SequenceChunk(ids, 0, [0])], cache)
    other = network.empty_like()
    weights = CodeModel(network.spec).state_dict()
    other.load(weights)
    network.swap_weights(other)
    fresh = InferenceModel(network.spec, weights, network.num_ids, CPU, "f32")
    after = network.forward([SequenceChunk(ids, 0, [0])], cache)
    torch.testing.assert_close(after, fresh.forward([SequenceChunk(ids, 0, [0])], cache))
    assert not torch.allclose(after, before)


@needs_library
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_products_equal_those_with_the_dequantized_weights(precision: Precision) -> None:
    """The packed layout of every fused matrix and of the head: float32 on the numbers they hold gives nearly the same
    logits, because only activations are rounded."""
    _, network, cache = make(precision, qk_norm=True)
    ids = list(range(20, 50))
    weights = CodeModel(network.spec).state_dict()
    every_id = range(network.spec.vocab)
    weights |= {"embed.weight": network.embedding(every_id), "norm.weight": network.norms[-1]}
    exact = InferenceModel(network.spec, weights, network.num_ids, CPU, "f32")
    for name in ("norms", "head_norms"):
        getattr(exact, name).copy_(getattr(network, name))
    for layer in range(network.spec.layers):
        for name in ("qkv", "o", "gate_up", "down"):
            matrix = exact.matrix(name, layer)
            matrix.pieces.clear()
            matrix.put(0, packed.pack(network.matrix(name, layer).dequantize(), 32))
    exact.finish_loading()
    exact_cache = PagedCache(network.spec, 8, device=CPU, dtype=torch.float32)
    for count in (24, 6):
        chunk = SequenceChunk(ids[:count], 0, [3, 1, 5], count)
        ours, theirs = network.forward([chunk], cache), exact.forward([chunk], exact_cache)
        assert (ours - theirs).abs().max() < 1.0, "logits spread over tens"
        assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.8


def test_without_the_native_library_float32_is_torchs_and_quantized_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "open_library", lambda: None)
    model, network, cache = make("f32", qk_norm=False)
    ids = list(range(20, 50))
    expected = model(torch.tensor(ids)[None])[0]
    for count in (24, 6, 1):
        scores = network.forward([SequenceChunk(ids[:count], 0, [3, 1, 5], count)], cache)
        assert (scores - expected[:count]).abs().max() < TOLERANCE["f32"]
    with pytest.raises(UserError, match="native engine library"):
        make("int8", qk_norm=False)
