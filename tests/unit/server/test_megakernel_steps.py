"""The megakernel on a CPU (tests/cuda_emulation.h): steps of small models equal float32 on the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cuda_emulation import EmulatedKernel, EmulatedTensorMap, needs_compiler

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu import megakernel, quantized
from lakh.server.model.gpu.decode_batch import DecodeBatch
from lakh.server.model.gpu.megakernel import Megakernel, MegakernelPlan
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_compiler]
CPU = torch.device("cpu")
NUM_BLOCKS = 8  # of the cache


def make(shape: tuple[int, ...], bits: int) -> tuple[InferenceModel, InferenceModel]:
    """The network of the megakernel, and float32 with the numbers that it holds."""
    layers, width, heads, kv_heads, ffn, num_ids = shape
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    spec = Model(**sizes, vocab=-(-num_ids // 64) * 64, context=NUM_BLOCKS * BLOCK_TOKENS, tied=False)  # type: ignore[arg-type]
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {
        name: (tensor.detach() * (6 if tensor.dim() > 1 else 1)).bfloat16()
        for name, tensor in model.state_dict().items()
    }
    network = InferenceModel(spec, weights, num_ids, CPU, "bf16")
    if bits == 16:
        return network, InferenceModel(spec, weights, num_ids, CPU, "f32")
    network.precision, network._gpu_bits = ("fp8", 8) if bits == 8 else ("int4", 4)  # as on a GPU
    network._allocate()
    network.load(weights)
    for name, tensor in weights.items():
        if tensor.dim() > 1 and name != "embed.weight":
            matrix = quantized.as_matrix(quantized.quantize(tensor, bits), tensor.shape[1])
            weights[name] = quantized.dequantize(matrix, torch.float32)
    return network, InferenceModel(spec, weights, num_ids, CPU, "f32")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def smallest_plan(network: InferenceModel, blocks: int, bits: int, wgmma: bool) -> MegakernelPlan:
    """With the least shared memory, so that weights soon come to where earlier ones were. With 4 bits also room for
    keys and values, but for heads of 64."""
    more_bytes = megakernel.KEPT_BYTES if bits == 4 and network.spec.head_dim != 64 else 0
    for kib in range(227):
        if isinstance(megakernel.plan(network.spec, network.num_ids, blocks, 1024 * kib, bits, wgmma), MegakernelPlan):
            plan = megakernel.plan(network.spec, network.num_ids, blocks, 1024 * kib + more_bytes, bits, wgmma)
            assert isinstance(plan, MegakernelPlan)
            assert plan.keeps_tokens == (more_bytes > 0)
            return plan
    pytest.fail("nothing fits")


# Layers, width, heads, key/value heads, ffn, ids; blocks; bytes of a chunk of weights; bits; WGMMA.
CASES = [
    # More heads than blocks, heads of 32; a chunk is a row or a few.
    ((2, 256, 8, 2, 320, 97), 5, 400, 16, False),
    ((2, 256, 8, 2, 320, 97), 5, 2048, 4, False),
    # Groups of columns and rows that are not whole, the last of all beside the padding; odd numbers of groups.
    ((2, 192, 6, 2, 320, 97), 5, 16384, 8, True),
    ((2, 192, 6, 2, 320, 97), 5, 8192, 16, True),
    # Two splits of a sequence, heads of 64; rows of more tiles than a lane reads at once, which no number divides.
    ((1, 128, 2, 1, 1216, 131), 6, 8192, 8, True),
    ((1, 128, 2, 1, 1216, 131), 6, 16384, 16, True),
    ((1, 128, 2, 1, 2112, 131), 6, 18432, 4, False),
    # Heads of 128; blocks without rows of the head.
    ((1, 256, 2, 2, 64, 7), 9, 18432, 4, False),
    # More tokens than wait in shared memory.
    ((1, 256, 1, 1, 64, 7), 1, 18432, 4, False),
]


@pytest.mark.parametrize(("shape", "blocks", "chunk_bytes", "bits", "wgmma"), CASES, ids=str)
@torch.inference_mode()
def test_steps_equal_float32(
    shape: tuple[int, ...],
    blocks: int,
    chunk_bytes: int,
    bits: int,
    wgmma: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, exact = make(shape, bits)
    monkeypatch.setattr(EmulatedKernel, "folder", tmp_path, raising=False)
    monkeypatch.setattr(megakernel, "CudaKernel", EmulatedKernel)
    monkeypatch.setattr(megakernel, "TensorMap", EmulatedTensorMap)
    monkeypatch.setitem(megakernel.CHUNK_BYTES, bits, chunk_bytes)
    plan = smallest_plan(network, blocks, bits, wgmma)
    ours = PagedCache(network.spec, NUM_BLOCKS, device=CPU, dtype=network.dtype)
    theirs = PagedCache(exact.spec, NUM_BLOCKS, device=CPU, dtype=torch.float32)
    kernel = Megakernel(network, ours, plan)
    batch = DecodeBatch(1, NUM_BLOCKS, CPU)
    table = list(reversed(range(NUM_BLOCKS)))  # in any order
    batch.tables[0] = torch.tensor(table)
    prompt = torch.randint(0, network.num_ids, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    launches = 0
    for length, steps in ((0, 2), (100, 2)):
        if length:
            exact.forward([SequenceChunk(prompt[:length], 0, table, 0)], theirs)
        ours.keys_LKCD.copy_(theirs.keys_LKCD), ours.values_LKCD.copy_(theirs.values_LKCD)
        batch.positions[0], batch.tokens[0], batch.steps[0] = length, 7, 0
        for step in range(steps):
            token = int(batch.tokens[0])
            expected = exact.forward([SequenceChunk([token], length + step, table, 1)], theirs)
            kernel(batch)
            launches += 1
            off = relative(batch.logits, expected)
            assert off < 1.5e-2, f"step {step} after {length} tokens: {off:.1e}"  # bf16 between layers
            assert batch.history[step, 0] == batch.tokens[0] == batch.logits.argmax()
            assert (int(batch.positions[0]), int(batch.steps[0])) == (length + step + 1, step + 1)
            assert kernel._counters.tolist() == [launches, 0]
            for mine, wide in ((ours.keys_LKCD, theirs.keys_LKCD), (ours.values_LKCD, theirs.values_LKCD)):
                assert torch.allclose(mine.float(), wide, atol=2e-2 * float(wide.abs().max()))
