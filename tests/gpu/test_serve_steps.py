"""Steps on the GPU: CUDA graphs compute the logits of the generic torch path.

Without a GPU, Triton's interpreter can run the kernels: TRITON_INTERPRET=1, where Triton is installed.
"""

import os

import pytest
import torch

from lakh.server.model.inference import InferenceModel, SequenceChunk
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
# Heads and key/value heads: a group of 2, of 3 (padded), and none; norms on queries and keys.
SHAPES = [(4, 2, False), (6, 2, False), (4, 4, False), (4, 2, True)]


# Those, and a KV cache of int8.
CACHED_SHAPES = [(*shape, torch.float32) for shape in SHAPES] + [(4, 2, False, torch.int8), (4, 4, True, torch.int8)]


def make(
    heads: int,
    kv_heads: int,
    qk_norm: bool = False,
    kv_dtype: torch.dtype = torch.float32,
    context: int = 1024,
) -> tuple[InferenceModel, PagedCache, PagedCache]:
    layers = 1 if INTERPRETED else 2
    shape = {"heads": heads, "kv_heads": kv_heads, "qk_norm": qk_norm}
    spec = Model(layers=layers, width=32 * heads, ffn=64, vocab=320, context=context, **shape)  # type: ignore[arg-type]
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {name: tensor.detach() * (6 if tensor.dim() > 1 else 1) for name, tensor in model.state_dict().items()}
    network = InferenceModel(spec, weights, spec.vocab, DEVICE, "f32")
    caches = [PagedCache(spec, 101, device=DEVICE, dtype=kv_dtype) for _ in range(2)]
    return network, caches[0], caches[1]


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("heads", "kv_heads", "qk_norm", "kv_dtype"), CACHED_SHAPES)
def test_a_captured_step_gives_the_logits_of_the_generic_path(
    heads: int, kv_heads: int, qk_norm: bool, kv_dtype: torch.dtype
) -> None:
    from lakh.server.model.gpu.prefill import PrefillGraphs

    network, plain, captured = make(heads, kv_heads, qk_norm, kv_dtype)
    chunks = PrefillGraphs(network, captured, use_graphs=not INTERPRETED)
    long = 12 if INTERPRETED else 230  # the interpreter needs minutes for what the chip does in microseconds
    tables = [list(range(row * 20, row * 20 + 20)) for row in range(4)]
    steps = [
        [
            SequenceChunk(ids(long, 1), 0, tables[0], 0),
            SequenceChunk(ids(3, 2), 0, tables[1], 1),
        ],  # a prompt begins, one is whole
        [
            SequenceChunk(ids(9, 3), long, tables[0], 1),
            SequenceChunk([5], 3, tables[1], 1),
            SequenceChunk(ids(3, 4), 0, tables[2], 2),
        ],
        [
            SequenceChunk([9], long + 9, tables[0], 1),
            SequenceChunk(ids(5, 5), 4, tables[1], 5),
            SequenceChunk([3], 3, tables[2], 1),
        ],
        [SequenceChunk(ids(9, 6), 0, tables[3], 0)],  # nothing to score
    ]
    for segments in steps:
        assert chunks.fits(segments)
        step = chunks.launch(segments)
        assert step.most_likely() == step.logits.argmax(dim=-1).tolist()
        found, expected = step.logits.float(), network.forward(segments, plain).float()
        assert found.shape == expected.shape
        # float32 sums in another order; tensor cores may round products to tf32
        assert torch.allclose(
            found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max() if len(expected) else 1)
        )
        if len(found):
            assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.7
    assert_same_caches(captured, plain)


def assert_same_caches(ours: PagedCache, theirs: PagedCache) -> None:
    """Outside the block that no sequence uses."""
    slots = torch.arange(1600, device=DEVICE)
    for layer in range(len(ours.keys_LKCD)):
        pairs = (ours.keys(layer), theirs.keys(layer)), (ours.values(layer), theirs.values(layer))
        for found, expected in ((one.read(slots), other.read(slots)) for one, other in pairs):
            assert torch.allclose(found, expected, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "qk_norm", "kv_dtype"), CACHED_SHAPES)
def test_decoding_gives_the_logits_of_the_generic_path(
    rows: int, heads: int, kv_heads: int, qk_norm: bool, kv_dtype: torch.dtype
) -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, plain, captured = make(heads, kv_heads, qk_norm, kv_dtype)
    decoder = Decoder(network, captured, use_graphs=not INTERPRETED)
    lengths = [70 if INTERPRETED else 400, 17, 1][:rows]  # several parts of attention, and none
    blocks = [list(range(row * 30, row * 30 + 30)) for row in range(rows)]
    for cache in (plain, captured):
        network.forward([SequenceChunk(ids(lengths[row], row), 0, blocks[row], 0) for row in range(rows)], cache)
    tokens = [7 + row for row in range(rows)]
    expected = network.forward([SequenceChunk([tokens[row]], lengths[row], blocks[row]) for row in range(rows)], plain)
    with torch.inference_mode():
        drawn, found = decoder.run(tokens, lengths, blocks, 1)
    # tensor cores may round products to tf32
    assert torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    assert drawn == [found.argmax(-1).tolist()]
    assert_same_caches(captured, plain)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_burst_samples_the_tokens_of_single_steps(rows: int) -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, cache, _ = make(4, 2)
    decoder = Decoder(network, cache, use_graphs=not INTERPRETED)
    launches = [1, 1] if INTERPRETED else [2, 3, 1, 6]
    blocks = [list(range(row * 6, row * 6 + 6)) for row in range(rows)]
    with torch.inference_mode():
        burst = decoder.multi_step([7] * rows, [0] * rows, blocks)
        burst.launch(launches[0])
        parts = []
        for steps in launches[1:]:
            burst.launch(steps)  # the one before is not read yet
            parts.append(burst.read())
        parts.append(burst.read())
        assert [len(part) for part in parts] == launches
        one_by_one, tokens = [], [7] * rows
        for step in range(sum(launches)):
            tokens = decoder.run(tokens, [step] * rows, blocks, 1)[0][0]
            one_by_one.append(tokens)
    assert [step for part in parts for step in part] == one_by_one


def test_an_abandoned_burst_does_not_affect_others() -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, cache, _ = make(4, 2)
    decoder = Decoder(network, cache, use_graphs=not INTERPRETED)
    steps = 1 if INTERPRETED else 8
    with torch.inference_mode():
        expected = decoder.run([9] * 2, [0] * 2, [[6], [7]], steps)[0]
        decoder.multi_step([7] * 2, [0] * 2, [[0], [1]]).launch(1 if INTERPRETED else 16)
        again = decoder.multi_step([9] * 2, [0] * 2, [[6], [7]])
        again.launch(steps)
        assert again.read() == expected


@pytest.mark.skipif(INTERPRETED, reason="without graphs nothing is remembered")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_graph_owns_the_memory_that_it_writes(rows: int) -> None:
    """Other code frees and reuses torch's workspace for matrix products."""
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.prefill import PrefillGraphs

    spec = Model(layers=2, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=320, context=1024)
    model = CodeModel(spec)
    init_weights(model, 1)
    network = InferenceModel(spec, model.state_dict(), spec.vocab, DEVICE, "bf16")
    cache = PagedCache(spec, 301, device=DEVICE, dtype=torch.bfloat16)
    decoder, chunks = Decoder(network, cache), PrefillGraphs(network, cache)
    tables = [list(range(row * 4, row * 4 + 4)) for row in range(rows)]
    prompts = [SequenceChunk(ids(8, row), 0, tables[row], 1) for row in range(rows)]

    def run() -> tuple[list[list[float]], list[list[int]]]:
        scores = chunks.launch(prompts).logits.tolist()
        return scores, decoder.run([7] * rows, [8] * rows, tables, 4)[0]

    with torch.inference_mode():
        expected = run()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        assert run() == expected
        sizes = [1 << 20] * 64 + [1 << power for power in range(1, 17) for _ in range(64)]
        taken = [torch.full((size,), 7, dtype=torch.int32, device=DEVICE) for size in sizes]
        assert run() == expected
        assert all(bool((tensor == 7).all()) for tensor in taken)


def test_a_sequence_past_its_blocks_writes_to_the_unused_block() -> None:
    from lakh.server.model.gpu.decode import Decoder

    network, cache, _ = make(4, 2)
    decoder = Decoder(network, cache, use_graphs=not INTERPRETED)
    with torch.inference_mode():
        burst = decoder.multi_step([7, 8], [15, 0], [[3], [4]])
        burst.launch(2)
        burst.read()
    used = (3, 4, cache.num_blocks - 1)
    others = [slot for slot in range(cache.num_blocks * 16) if slot // 16 not in used]
    assert not cache.keys_LKCD[:, :, others].any()
    assert cache.keys_LKCD[:, :, 4 * 16 + 1].any()


def test_timing_tiles_stays_within_the_context_and_leaves_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.decode_batch import DecodeBatch

    network, cache, _ = make(4, 2, context=48)
    decoder = Decoder(network, cache, use_graphs=not INTERPRETED)
    if INTERPRETED:  # no graphs and no clock of a device: what is timed is played all the same, a little of it
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        for name, small in (("decode.TIMED_RUNS", 1), ("decode.TIMED_STEPS", 2), ("single_sequence.MAX_SPLITS", 2)):
            monkeypatch.setattr(f"lakh.server.model.gpu.{name}", small)
    places, step = [], decoder._step

    def watched(batch: DecodeBatch) -> None:
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            places.append(int(batch.positions.max()))
        step(batch)

    monkeypatch.setattr(decoder, "_step", watched)
    with torch.inference_mode():
        batch = decoder._batch(1)
        decoder._time_s(batch, lambda: decoder._step(batch))
        decoder._time_s(batch, lambda: decoder._step(batch))
    assert min(places) >= 0
    assert max(places) < 48
    assert not cache.keys_LKCD[:, :, :1600].any()
    assert not cache.values_LKCD[:, :, :1600].any()


def test_batches_that_do_not_fit_a_graph_are_reported() -> None:
    from lakh.server.model.gpu.prefill import BUCKETS, MAX_SEQUENCES, PrefillGraphs

    network, cache, _ = make(4, 2)
    chunks = PrefillGraphs(network, cache, use_graphs=not INTERPRETED)
    assert not chunks.fits([SequenceChunk([1] * (BUCKETS[-1] + 1), 0, [0], 1)])
    assert not chunks.fits([SequenceChunk([1], 0, [0], 1)] * (MAX_SEQUENCES + 1))
    assert chunks.fits([SequenceChunk([1] * BUCKETS[-1], 0, [0], 1)])
