"""Model families on the GPU: what the fast paths compute equals the generic path, and windows equal their mask."""

import logging

import pytest
import torch

from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.runner import Runner
from lakh.spec.model import Experts, Latent, Model, SlidingWindow
from lakh.spec.run import Training
from lakh.workloads.code.acceleration import choose_ops
from lakh.workloads.code.attention import (
    AttentionVariant,
    Documents,
    flash_attention,
    sdpa_attention,
    variant_attention,
)
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"), pytest.mark.timeout(300)]

SIZES = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 320, "context": 256}
WINDOW = SlidingWindow(tokens=48, share=0.5)
FAMILIES = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "llama with biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": True, "head_size": 64},
    "starcoder2": {"gated": False, "sliding_window": WINDOW},
    "gpt_bigcode": {"gated": False, "kv_heads": 1},
    "gpt_oss": {"sliding_window": WINDOW, "experts": Experts(count=4, top_k=2, ffn=64, bias=True)},
    "deepseek_v2": {
        "kv_heads": 4,
        "latent": Latent(kv_rank=48, rope_dim=16),
        "experts": Experts(count=4, top_k=2, ffn=64, shared=1, dense_layers=1, normalize=False),
    },
    "gemma2": {"sliding_window": WINDOW, "attention_softcap": 20.0, "logit_softcap": 10.0, "query_scale": 16},
}


def make(family: str) -> CodeModel:
    model = CodeModel(Model(**{"family": family, **SIZES, **FAMILIES[family]}))  # type: ignore[arg-type]
    init_weights(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_flash_attention_with_a_window_or_in_chunks_equals_its_mask(with_documents: bool, is_chunked: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 200, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64)]
    parts = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    documents = None
    if with_documents:
        starts = torch.tensor([0, 30, 200, 210, 400], dtype=torch.int32, device="cuda")
        documents = Documents.padded(starts, 190, 200)
    variant = AttentionVariant(window=33, is_chunked=is_chunked)
    results = []
    for dtype, kernel in ((torch.bfloat16, flash_attention), (torch.float32, sdpa_attention)):
        q, k, v = (part.to(dtype).requires_grad_() for part in parts)
        y = variant_attention(q, k, v, documents, variant, plain=kernel)
        y.float().square().sum().backward()
        results.append([y.float(), q.grad.float(), k.grad.float(), v.grad.float()])
    for found, expected in zip(*results, strict=True):
        assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_has_the_loss_and_gradients_of_the_cpu(family: str) -> None:
    tokens = torch.randint(0, 320, (2, 129), generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", "cuda"):
        model = make(family).to(device)
        ops, _, _ = choose_ops(model.spec, Training(compile="none"), bf16=False, device=device)
        model.set_ops(ops)
        there = tokens.to(device)
        loss = model(there[:, :-1], targets_BT=there[:, 1:])
        loss.backward()
        grads = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
        found.append((loss.item(), grads))
    (cpu, cpu_grads), (cuda, cuda_grads) = found
    assert cuda == pytest.approx(cpu, abs=2e-3)  # tf32 products
    assert torch.nn.functional.cosine_similarity(cpu_grads, cuda_grads, dim=0) > 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_the_runner_equal_the_generic_path(family: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = make(family)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    device = torch.device("cuda")
    runner = Runner(model.spec, weights, 320, device=device, precision="f32", cache_tokens=1024)
    network = InferenceModel(model.spec, weights, 320, torch.device("cpu"), "f32")
    assert (runner.decoder is not None) == (family in ("qwen2", "qwen3", "llama with biases"))
    assert ("generic torch path" in caplog.text) == (runner.decoder is None)
    plain = PagedCache(model.spec, 20, device=torch.device("cpu"), dtype=torch.float32)
    ids = torch.randint(0, 320, (2, 80), generator=torch.Generator().manual_seed(2)).tolist()
    tables = [list(range(8)), list(range(8, 16))]
    for start, end in ((0, 60), (60, 61), (61, 62), (62, 70), (70, 71)):
        for rows in ([0, 1],) if end - start > 1 else ([0, 1], [0]):  # a single sequence has its own kernels
            chunks = [SequenceChunk(ids[row][start:end], start, tables[row], 1) for row in rows]
            found, expected = runner.forward(chunks).float().cpu(), network.forward(chunks, plain)
            assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
