"""The megakernel is as near to float32 as torch's bfloat16, and gives the same result every time."""

import dataclasses

import pytest
import torch

from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a Hopper GPU or later",
    ),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cuda")
# Layers, width, heads, key/value heads, ffn, ids: a usual shape; odd numbers of heads; heads of 32, 64, 128 and 256;
# fewer rows than SMs; rows so long that a chunk holds only one; ids that no number divides.
SHAPES = [
    (2, 2048, 16, 8, 5504, 32064),
    (3, 576, 9, 3, 1536, 1001),
    (2, 256, 8, 1, 320, 320),
    (1, 256, 2, 2, 64, 97),
    (2, 512, 2, 1, 704, 640),
    (2, 1024, 8, 4, 14336, 512),
]


@pytest.fixture(params=[False, True], ids=["mma", "wgmma"], autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakh.server.model.gpu import megakernel

    monkeypatch.setitem(megakernel.WGMMA, 16, request.param)


def make(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, num_ids: int
) -> tuple[InferenceModel, InferenceModel]:
    """In bfloat16, and the same weights in float32."""
    shape = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    spec = Model(**shape, vocab=-(-num_ids // 64) * 64, context=1024)  # type: ignore[arg-type]
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {
        name: (tensor.detach() * (6 if tensor.dim() > 1 else 1)).bfloat16()
        for name, tensor in model.state_dict().items()
    }
    return tuple(InferenceModel(spec, weights, num_ids, DEVICE, precision) for precision in ("bf16", "f32"))  # type: ignore[return-value]


def cache_of(network: InferenceModel) -> PagedCache:
    return PagedCache(network.spec, 65, device=DEVICE, dtype=network.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_it_is_as_near_to_float32_as_torch(shape: tuple[int, int, int, int, int, int]) -> None:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.megakernel import Megakernel

    network, exact = make(*shape)
    plain, wide, ours = cache_of(network), cache_of(exact), cache_of(network)
    plan = Megakernel.plan(network)
    assert not isinstance(plan, str)
    megakernel = Megakernel(network, ours, plan)
    decoder = Decoder(network, ours, use_graphs=False)
    blocks = list(reversed(range(64)))  # in any order
    prompt = torch.randint(0, network.num_ids, (700,), generator=torch.Generator().manual_seed(3)).tolist()
    for length in (0, 1, 15, 16, 70, 700):
        for network_, cache in ((network, plain), (exact, wide)):
            if length:
                network_.forward([SequenceChunk(prompt[:length], 0, blocks, 0)], cache)
        ours.keys_LKCD.copy_(plain.keys_LKCD), ours.values_LKCD.copy_(plain.values_LKCD)
        step = [SequenceChunk([7], length, blocks, 1)]
        torchs, expected = network.forward(step, plain).float(), exact.forward(step, wide)
        batch = decoder.load_batch([7], [length], [blocks])
        megakernel(batch)
        found = batch.logits.clone()
        off, torchs_off = (float((scores - expected).norm() / expected.norm()) for scores in (found, torchs))
        assert off < max(1.5 * torchs_off, 1e-2), f"after {length} tokens: {off:.1e}, torch {torchs_off:.1e}"
        assert batch.history[0, 0] == batch.tokens[0] == found.argmax()
        assert (int(batch.positions[0]), int(batch.steps[0])) == (length + 1, 1)
        for mine, theirs in ((ours.keys_LKCD, plain.keys_LKCD), (ours.values_LKCD, plain.values_LKCD)):
            assert torch.allclose(mine.float(), theirs.float(), atol=5e-2 * float(theirs.abs().max()))


@torch.inference_mode()
def test_several_steps_equal_single_ones_and_repeat_exactly() -> None:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.decode_batch import HISTORY
    from lakh.server.model.gpu.graphs import GraphCapture
    from lakh.server.model.gpu.megakernel import Megakernel

    network, _ = make(*SHAPES[0])
    cache = cache_of(network)
    plan = Megakernel.plan(network)
    assert not isinstance(plan, str)
    megakernel = Megakernel(network, cache, plan)
    decoder = Decoder(network, cache, use_graphs=False)
    blocks = list(range(64))
    batch = decoder.load_batch([7], [0], [blocks])
    replay = GraphCapture(DEVICE)(lambda: megakernel(batch), prepare=batch.steps.zero_)

    def run_steps() -> tuple[list[int], torch.Tensor]:
        decoder.load_batch([7], [0], [blocks])
        for _ in range(HISTORY):
            replay()
        return batch.history[:, 0].tolist(), batch.logits.clone()

    tokens, scores = run_steps()
    assert len(set(tokens)) > 8
    token = 7
    for at, expected in enumerate(tokens):
        decoder.load_batch([token], [at], [blocks])
        megakernel(batch)
        token = int(batch.tokens[0])
        assert token == expected
    for _ in range(40):  # blocks come and go in another order each time; sums do not
        again, again_scores = run_steps()
        assert again == tokens
        assert torch.equal(again_scores, scores)


@torch.inference_mode()
def test_new_weights_are_used_from_the_next_step_on() -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, _ = make(*SHAPES[0])
    decoder = Decoder(network, cache_of(network))
    before = decoder.run([7], [0], [[0]], 1)[1].clone()
    for layer in range(network.spec.layers):
        network.matrix("down", layer).mul_(-1)
    after = decoder.run([7], [0], [[0]], 1)[1]
    assert not torch.allclose(before, after, atol=1e-2 * float(before.abs().max()))


def test_unsupported_models_get_a_reason() -> None:
    from lakh.server.model.gpu.megakernel import Megakernel

    bf16, f32 = make(*SHAPES[2])
    assert not isinstance(Megakernel.plan(bf16), str)
    assert isinstance(Megakernel.plan(f32), str)
    bf16.shard = dataclasses.replace(bf16.shard, size=2)
    assert isinstance(Megakernel.plan(bf16), str)
