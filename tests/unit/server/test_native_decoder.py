"""On a CPU the logits of a token depend on its own sequence only, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import inference
from lakh.server.model.adapters import LowRankUpdate, ServedAdapter
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.cpu import decoder, native, packed
from lakh.server.model.cpu.graph import Kind
from lakh.server.model.inference import InferenceModel, Precision, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.paged_attention import PagedStep
from lakh.spec.model import Experts, Latent, Model, RopeScaling, SlidingWindow
from lakh.workloads.code.attention import AttentionVariant
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.ops import run_experts

library = native.open_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native engine library is not built")
CPU = torch.device("cpu")
KERNELS = library.lakh_engine_kernels().decode().split() if library is not None else ["none"]
LENGTHS = (1, 2, 3, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen2": {"family": "qwen2"},
    "ministral3": {
        "family": "ministral3",
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context=8),
        "query_growth": 0.3,
    },
    "seed_oss": {"family": "seed_oss", "head_size": 32},
    "phi3": {"family": "phi3"},
    "window": {"sliding_window": SlidingWindow(tokens=9), "family": "mistral"},
    "rotated in part": {"family": "phi3", "rotary_size": 8},
    "smollm3": {"family": "smollm3", "unrotated_interval": 2},
    "starcoder2": {"family": "starcoder2", "gated": False},
    "gpt_bigcode": {"family": "gpt_bigcode", "gated": False, "kv_heads": 1},
    "gpt_bigcode with exact GELU": {"family": "gpt_bigcode", "gated": False, "kv_heads": 6, "exact_gelu": True},
    "stablelm": {"family": "stablelm", "rotary_size": 4},
    "stablelm with biases": {"family": "stablelm", "rotary_size": 4, "attention_bias": True},
    "stablelm with norms of heads": {
        "family": "stablelm",
        "rotary_size": 4,
        "qk_norm": True,
        "parallel_residual": True,
    },
    "glm4": {"family": "glm4", "rotary_size": 8, "attention_bias": True},
    "granite": {
        "family": "granite",
        "embedding_scale": 3.0,
        "score_scale": 0.2,
        "residual_scale": 0.6,
        "logit_divisor": 2.0,
    },
    "olmo2": {"family": "olmo2", "qk_norm": True},
    "olmo3": {
        "family": "olmo3",
        "qk_norm": True,
        "local_rope_base": 1e4,
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context=8),
        "sliding_window": SlidingWindow(tokens=9, share=0.75),
    },
    "gemma": {"family": "gemma", "head_size": 32},
    "gemma2": {
        "family": "gemma2",
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "query_scale": 9,
        "sliding_window": SlidingWindow(tokens=9, share=0.5),
    },
    "gemma3": {
        "family": "gemma3",
        "qk_norm": True,
        "local_rope_base": 50.0,
        "sliding_window": SlidingWindow(tokens=9, share=0.5),
    },
    "mixtral": {"experts": Experts(count=5, top_k=2, ffn=64)},
    "qwen3_moe": {"experts": Experts(count=6, top_k=3, ffn=32, normalize=False), "qk_norm": True},
    "llama4": {
        "family": "llama4",
        "qk_norm": True,
        "unrotated_interval": 2,
        "experts": Experts(count=6, top_k=1, ffn=64, shared=1, interval=2, normalize=False),
    },
    "llama4 with chunks": {
        "family": "llama4",
        "qk_norm": True,
        "unrotated_interval": 2,
        "experts": Experts(count=6, top_k=1, ffn=64, shared=1, interval=2, normalize=False),
        "sliding_window": SlidingWindow(tokens=7, share=0.5),
        "query_growth": 0.3,
        "growth_interval": 5,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "experts": Experts(count=5, top_k=2, ffn=64, bias=True),
        "sliding_window": SlidingWindow(tokens=9, share=0.5),
    },
    "qwen2_moe": {
        "layers": 4,
        "family": "qwen2_moe",
        "experts": Experts(count=6, top_k=2, ffn=32, shared=2, dense_layers=1, interval=2, normalize=False),
    },
    "minimax_m2": {
        "family": "minimax_m2",
        "qk_norm": True,
        "rotary_size": 8,
        "experts": Experts(count=6, top_k=3, ffn=64),
    },
    "deepseek_v2": {
        "family": "deepseek_v2",
        "kv_heads": 6,
        "head_size": 32,
        "latent": Latent(kv_rank=32, rope_dim=8, q_rank=64),
        "experts": Experts(count=5, top_k=2, ffn=64, shared=2, dense_layers=1, normalize=False),
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "kv_heads": 6,
        "head_size": 32,
        "latent": Latent(kv_rank=32, rope_dim=8, q_rank=64),
        "experts": Experts(
            count=12, top_k=3, ffn=64, shared=1, dense_layers=1, groups=4, top_groups=2, weight_scale=2.5
        ),
    },
    "glm4_moe": {
        "family": "glm4_moe",
        "qk_norm": True,
        "rotary_size": 8,
        "experts": Experts(count=6, top_k=3, ffn=64, shared=1, dense_layers=1, weight_scale=2.5),
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    assert library is not None
    library.lakh_engine_set_threads(1)


def make(precision: Precision, **changes: Any) -> InferenceModel:
    sizes = {"layers": 2, "width": 96, "heads": 6, "kv_heads": 2, "ffn": 160, "vocab": 300, "context": 96}
    spec = Model(**{**sizes, **changes})
    model = CodeModel(spec).requires_grad_(False)
    init_weights(model, 1)
    numbers = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.mul_(8 if parameter.dim() > 1 else torch.rand(parameter.shape, generator=numbers) + 0.5)
    return InferenceModel(spec, model.state_dict(), spec.vocab, CPU, precision)


def make_cache(network: InferenceModel, dtype: torch.dtype = torch.float32) -> PagedCache:
    return PagedCache(network.spec, 24, device=CPU, dtype=dtype)


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("precision", "kv_dtype"), [("f32", torch.float32), ("int8", torch.int8), ("int4", torch.float32)]
)
@pytest.mark.parametrize("name", list(MODELS))
def test_cached_beginnings_and_neighbours_change_no_bit(name: str, precision: Precision, kv_dtype: torch.dtype) -> None:
    network = make(precision, **MODELS[name])
    neighbours = [SequenceChunk(some_ids(5 + row, row), 0, [10 + row]) for row in range(4)]
    for length in LENGTHS:
        ids = some_ids(length + 1, 7 * length)
        whole = make_cache(network, kv_dtype)
        expected = network.forward([SequenceChunk(ids[:-1], 0, [3, 1], 1)], whole)[0]
        after = network.forward([SequenceChunk(ids[-1:], length, [3, 1])], whole)[0]
        for cached in sorted({0, 1, length // 2, length - 2, length - 1} & set(range(length))):
            alone, beside = make_cache(network, kv_dtype), make_cache(network, kv_dtype)
            for cache, others in ((alone, []), (beside, neighbours)):
                if cached:
                    network.forward([*others[:1], SequenceChunk(ids[:cached], 0, [5, 6], 0)], cache)
                tail = SequenceChunk(ids[cached:-1], cached, [5, 6])
                found = network.forward([*others[1:], tail], cache)[-1]
                assert torch.equal(found, expected), f"{length} tokens, {cached} cached, {len(others)} beside"
                found = network.forward([*others[2:], SequenceChunk(ids[-1:], length, [5, 6])], cache)[-1]
                assert torch.equal(found, after), f"the token after {length}"
        # After a preemption the prompt and what follows it are computed again in one chunk.
        again = network.forward([SequenceChunk(ids, 0, [8, 9], 2)], make_cache(network, kv_dtype))
        assert torch.equal(again, torch.stack([expected, after]))


@pytest.mark.parametrize("precision", ["f32", "int8", "int4"])
def test_texts_are_the_same_cold_cached_and_beside_others(
    precision: Precision, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(options={"precision": precision, "cache_tokens": 1024}, width=64, heads=4, ffn=128)
    prompts = [tuple(some_ids(length, 3 * length)) for length in LENGTHS]

    def run(*wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
        seqs = [engine.make_sequence(ids, SamplingParams(max_tokens=8, temperature=0)) for ids in wanted]
        engine.submit(*seqs)
        while any(seq.finish_reason is None for seq in seqs):
            engine.step()
        return [tuple(seq.tokens) for seq in seqs]

    cold = []
    for prompt in prompts:
        engine.pool.reset()
        cold += run(prompt)
    assert len(set(cold)) > 1, "the model gives every prompt the same text, so nothing is compared"
    assert [run(prompt)[0] for prompt in prompts] == cold
    assert run(*prompts) == cold
    engine.pool.reset()
    assert run(*prompts) == cold


def test_a_sequence_with_an_adapter_changes_no_bit_of_another() -> None:
    network = make("int8")
    update = LowRankUpdate(0, torch.ones(2, 96), torch.ones(96, 2))
    adapter = ServedAdapter("one", "digest", {("qkv", 0): (update,)})
    plain, adapted = SequenceChunk(some_ids(5, 1), 0, [1]), SequenceChunk(some_ids(7, 2), 0, [2], 2, adapter)
    alone = network.forward([plain], make_cache(network))
    with_adapter = network.forward([adapted], make_cache(network))
    together = network.forward([adapted, plain], make_cache(network))
    assert torch.equal(together, torch.cat([with_adapter, alone]))
    base = network.forward([SequenceChunk(adapted.tokens, 0, [2], 2)], make_cache(network))
    assert not torch.allclose(base, with_adapter)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("precision", "limit"), [("f32", 1e-5), ("int8", 0.01)])
@pytest.mark.parametrize("count", [1, 40])
def test_logits_are_those_of_torch(name: str, count: int, precision: Precision, limit: float) -> None:
    """The same weights, with the block of the architecture in torch between the products. In 8 bits a difference of
    rounding moves single numbers by a step; the matrices of latent heads are not rounded in torch."""
    network = make(precision, **MODELS[name])
    assert network._decoder is not None, "every architecture is one native call"
    chunk = SequenceChunk(some_ids(count, 1), 0, [3, 1, 5], count)
    ours = network.forward([chunk], make_cache(network))
    with torch.inference_mode():
        theirs = network._forward_torch([chunk], make_cache(network))
    is_rounded_latent = precision == "int8" and name in ("deepseek_v2", "deepseek_v3")
    assert (ours - theirs).norm() < (0.08 if is_rounded_latent else limit) * theirs.norm()


@pytest.mark.parametrize("sizes", [(40,), (3, 17, 1, 1, 18), (7, 7, 26), (1,) * 40])
@pytest.mark.parametrize("name", ["llama4 with chunks", "window"])
def test_windows_and_chunks_in_torch_are_those_of_the_library(
    name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no library, as on a GPU: prompts in pieces that end within a chunk, at its end and behind it."""
    network, ids = make("f32", **MODELS[name]), some_ids(40, 1)
    expected = network.forward([SequenceChunk(ids, 0, [3, 1, 5], 40)], make_cache(network))
    cache, found, start = make_cache(network), [], 0
    monkeypatch.setattr(inference, "PagedStep", lambda *args, is_native: PagedStep(*args, is_native=False))
    for size in sizes:
        with torch.inference_mode():
            piece = SequenceChunk(ids[start : start + size], start, [3, 1, 5], size)
            found.append(network._forward_torch([piece], cache))
        start += size
    assert (torch.cat(found) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_logits_are_those_of_the_same_numbers_in_float32(name: str, precision: Precision) -> None:
    """Every quantized matrix of every family is in its place: only activations are rounded."""
    changes = MODELS[name]
    network, exact = make(precision, **changes), make("f32", **changes)
    for ours, theirs in zip(network._packed_matrices(), exact._packed_matrices(), strict=True):
        theirs.pieces.clear()
        theirs.put(0, packed.pack(ours.dequantize(), 32))
    exact.finish_loading()
    chunk = SequenceChunk(some_ids(40, 1), 0, [3, 1, 5], 40)
    found, expected = network.forward([chunk], make_cache(network)), exact.forward([chunk], make_cache(exact))
    near = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Rounded activations change the choice of experts where two are nearly as good, and what follows.
    assert near.median() < 0.05
    assert (near < 0.1).float().mean() > (0.7 if "experts" in changes else 0.99)


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num", [1, 7, 40])
def test_experts_equal_torchs_and_only_those_with_tokens_are_read(bits: int, has_bias: bool, num: int) -> None:
    numbers = torch.Generator().manual_seed(num)
    count, width, ffn, top_k = 6, 64, 32, 2
    made = (torch.randn(shape, generator=numbers) for shape in ((count, 2 * ffn, width), (count, width, ffn)))
    pieces = [packed.pack(matrix, bits) for matrix in made]
    gate_up, down = (
        packed.PackedMatrix(columns, {0: piece}) for columns, piece in zip((width, ffn), pieces, strict=True)
    )
    bias = torch.randn((count, 2 * ffn), generator=numbers) if has_bias else None
    x = torch.randn((num, width), generator=numbers)
    chosen = torch.rand((num, count - 1), generator=numbers).topk(top_k).indices  # never the last one
    weights = torch.rand((num, top_k), generator=numbers)
    expected = run_experts(x, gate_up.dequantize(), down.dequantize(), chosen, weights, bias=bias)
    for piece in pieces:
        part = piece.values if piece.scales is None else piece.scales
        part.unflatten(0, (count, -1))[-1] = float("nan")
    found = packed.run_experts(x, gate_up, down, chosen, weights, bias=bias)
    assert (found - expected).norm() < (1e-5 if bits == 32 else 0.03) * expected.norm()
    alone = torch.cat([packed.run_experts(x[n : n + 1], gate_up, down, chosen[n : n + 1], weights[n : n + 1], bias=bias)
                       for n in range(num)])  # fmt: skip
    assert torch.equal(alone, found)


@pytest.mark.parametrize("precision", ["f32", "int8", "int4"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["llama", "starcoder2", "gemma2"])
def test_on_every_kernel_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    kernel: str, precision: Precision, name: str
) -> None:
    assert library is not None
    network = make(precision, **{**MODELS[name], "width": 256, "heads": 4, "kv_heads": 2})
    ids = some_ids(45, 1)
    try:
        assert library.lakh_engine_select(kernel.encode()) == 0
        whole = network.forward([SequenceChunk(ids, 0, [3, 1, 5], len(ids))], make_cache(network))
        cache = make_cache(network)
        for n, own in enumerate(ids):
            alone = network.forward([SequenceChunk([own], n, [3, 1, 5])], cache)[0]
            assert torch.equal(alone, whole[n]), f"token {n}"
    finally:
        library.lakh_engine_select(KERNELS[0].encode())
    fastest = network.forward([SequenceChunk(ids, 0, [3, 1, 5], len(ids))], make_cache(network))
    assert (whole - fastest).norm() < 0.01 * fastest.norm(), "activations are rounded to 8 bits"


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v2"])
def test_threads_change_no_bit(name: str) -> None:
    assert library is not None
    network = make("int8", **MODELS[name])
    chunk, results = SequenceChunk(some_ids(50, 1), 0, [3, 1, 5, 7], 50), []
    for threads in (1, 2, 4):
        assert library.lakh_engine_set_threads(threads) == threads
        results.append(network.forward([chunk], make_cache(network)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def place_of(slots: np.ndarray, num: int = 1) -> decoder.Place:
    return slots, np.zeros(num, np.int64), np.arange(len(slots) - num + 1, len(slots) + 1)


@pytest.mark.parametrize("bound", [None, 2.5])
@pytest.mark.parametrize("kv_bits", [32, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (5, 1, 20), (2, 2, 128), (8, 4, 12)])
def test_native_attention_equals_numpy(heads: int, kv_heads: int, size: int, kv_bits: int, bound: float | None) -> None:
    rng, capacity, num = np.random.default_rng(heads), 40, 19
    q = rng.standard_normal((num, heads, size), np.float32)
    slots = rng.permutation(capacity)[:30].astype(np.int64)
    if kv_bits == 32:
        arrays = plain = [rng.standard_normal((kv_heads, capacity, size), np.float32) for _ in range(2)]
    else:
        numbers = [rng.integers(-127, 128, (kv_heads, capacity, size)).astype(np.int8) for _ in range(2)]
        scales = [rng.random((kv_heads, capacity), np.float32) / 50 for _ in range(2)]
        arrays, plain = numbers + scales, [n * s[..., None] for n, s in zip(numbers, scales, strict=True)]
    structure, place = decoder.cache_structure(arrays, capacity), place_of(slots, num)
    variant = AttentionVariant(scale=0.3, softcap=bound)
    sinks = torch.from_numpy(rng.standard_normal(heads, np.float32)) if bound else None
    out = decoder.attend(torch.from_numpy(q), structure, kv_heads, place, variant, sinks).numpy()
    for n, length in enumerate(place[2]):
        seen = [np.repeat(part[:, slots[:length]].astype(np.float64), heads // kv_heads, axis=0) for part in plain]
        scores = 0.3 * np.einsum("hd,hsd->hs", q[n].astype(np.float64), seen[0])
        if bound and sinks is not None:
            scores = np.concatenate([bound * np.tanh(scores / bound), sinks.numpy()[:, None]], axis=1)
            seen[1] = np.pad(seen[1], ((0, 0), (0, 1), (0, 0)))  # the sink's weight is lost
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = np.einsum("hs,hsd->hd", weights / weights.sum(axis=1, keepdims=True), seen[1])
        np.testing.assert_allclose(out[n], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("loudness", [0.01, 30.0])
def test_bounds_sinks_and_windows_of_a_long_context_equal_float64(window: int | None, loudness: float) -> None:
    """Scores far inside the bound, and far outside of it, where all of them are nearly equal."""
    rng, size, length, bound = np.random.default_rng(3), 64, 20_000, 50.0
    keys, values = (rng.standard_normal((1, length, size), np.float32) for _ in range(2))
    q = (loudness * rng.standard_normal((1, 2, size))).astype(np.float32)
    variant = AttentionVariant(scale=size**-0.5, softcap=bound, window=window)
    sinks = torch.tensor([-3.0, 55.0])  # the second one is above every score
    structure, place = decoder.cache_structure([keys, values], length), place_of(np.arange(length, dtype=np.int64))
    out = decoder.attend(torch.from_numpy(q), structure, 1, place, variant, sinks).numpy()[0]
    first = 0 if window is None else length - window
    scores = size**-0.5 * q[0].astype(np.float64) @ keys[0, first:].astype(np.float64).T
    scores = np.concatenate([bound * np.tanh(scores / bound), sinks.double().numpy()[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    expected = weights[:, :-1] @ values[0, first:].astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["gemma", "deepseek_v2"])
def test_swapped_weights_are_those_that_a_step_computes_with(name: str) -> None:
    """Also where the graph holds numbers made of the weights: 1 + that of a norm, the matrices of latent heads."""
    network = make("int8", **MODELS[name])
    chunk = SequenceChunk(some_ids(9, 1), 0, [1])
    before = network.forward([chunk], make_cache(network))
    model = CodeModel(network.spec).requires_grad_(False)
    init_weights(model, 5)
    weights = {key: weight + 0.1 for key, weight in model.state_dict().items()}
    other = network.empty_like()
    other.load(weights)
    network.swap_weights(other)
    fresh = InferenceModel(network.spec, weights, network.spec.vocab, CPU, "int8")
    expected = fresh.forward([chunk], make_cache(network))
    assert torch.equal(network.forward([chunk], make_cache(network)), expected)
    assert not torch.allclose(before, expected)
    assert torch.equal(other.forward([chunk], make_cache(other)), before)


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert library is not None
    cache, slots = native.EngineCache(None, None, None, None, 4), np.arange(3, dtype=np.int64)
    places = decoder._places(place_of(slots))
    empty = decoder._places((slots, np.zeros(1, np.int64), np.zeros(1, np.int64)))
    scores = native.EngineScores(1.0, 0.0, 0, None)
    assert library.lakh_engine_attend(cache, places, scores, 9, 2, 64, None, None) == -1
    assert library.lakh_engine_attend(cache, empty, scores, 8, 2, 64, None, None) == -1
    half_scaled = native.EngineCache(None, None, slots.ctypes.data, None, 4)
    assert library.lakh_engine_attend(half_scaled, places, scores, 8, 2, 64, None, None) == -1
    network = make("int8")
    with pytest.raises(AssertionError, match="do not fit"):
        network.forward([SequenceChunk([300], 0, [1])], make_cache(network))
    with pytest.raises(AssertionError, match="do not fit"):
        network.forward([SequenceChunk([1], network.spec.context, list(range(7)))], make_cache(network))
    cache = make_cache(network)
    run = cast(Any, network._decoder).forward
    start, three = np.zeros(3, np.int64), np.arange(1, 4, dtype=np.int64)
    for wrong in (-1, cache.structure.capacity):
        with pytest.raises(AssertionError, match="do not fit"):
            run([1, 2, 3], (np.array([0, wrong, 1]), start, three), [2], cache.structure)
    for scored in ([3], [-1], [1, 0], [1, 1]):
        with pytest.raises(AssertionError, match="do not fit"):
            run([1, 2, 3], (slots, start, three), scored, cache.structure)
    assert run([1, 2, 3], (slots, start, three), [0, 2], cache.structure).isfinite().all()


@pytest.mark.parametrize("name", ["gpt_bigcode with exact GELU", "starcoder2", "gpt_oss", "deepseek_v3"])
def test_a_graph_whose_nodes_reach_beyond_a_buffer_is_refused(name: str) -> None:
    assert library is not None
    network = make("int8", **MODELS[name])
    graph = cast(Any, network._decoder)._graph
    nodes = cast(Any, network._decoder)._held[0].nodes
    assert library.lakh_engine_check(graph) == 0
    for structure, field, wrong in (
        (graph.embedding, "bits", 5),
        (graph.embedding, "scales", 0),
        (graph.head, "rows", 0),
        (graph, "kv_heads", 0),
        (graph, "rotary", 3),
    ):
        right = getattr(structure, field)
        setattr(structure, field, wrong)
        assert library.lakh_engine_check(graph) == -1, field
        setattr(structure, field, right)
    for node in nodes:
        kind = Kind(node.kind)
        changes: list[tuple[Any, str, int]] = [(node, "kind", 99), (node.inputs[2], "buffer", graph.num_buffers)]
        if kind not in (Kind.STORE, Kind.COPY_ROTARY):
            changes += [(node.out, "buffer", graph.num_buffers), (node.out, "offset", 1 << 20)]
        if kind is not Kind.COPY_ROTARY and node.inputs[0].buffer >= 0:
            changes += [(node.inputs[0], "buffer", graph.num_buffers), (node.inputs[0], "offset", 1 << 20)]
        if kind in (Kind.PRODUCT, Kind.HEAD_PRODUCTS, Kind.EXPERTS, Kind.ATTEND):
            changes.append((node, "weights", 0))
        for structure, field, wrong in changes:
            right = getattr(structure, field)
            setattr(structure, field, wrong)
            assert library.lakh_engine_check(graph) == -1, f"{kind.name}: {field}"
            setattr(structure, field, right)
        node.sizes[2] += 1 << 20
        is_whole = kind in (Kind.PRODUCT, Kind.HEAD_PRODUCTS, Kind.EXPERTS)  # which take their sizes from the weights
        assert is_whole or library.lakh_engine_check(graph) == -1, kind.name
        node.sizes[2] -= 1 << 20
        if kind < Kind.STORE:  # a result of many numbers in one place
            size, stride = node.sizes[0], node.out.strides[0]
            node.sizes[0], node.out.strides[0] = 1 << 62, 0
            assert library.lakh_engine_check(graph) == -1, kind.name
            node.sizes[0], node.out.strides[0] = size, stride
        if kind is Kind.TOP:  # then other numbers are read as indices
            node.kind = Kind.SOFTMAX
            assert library.lakh_engine_check(graph) == -1
            node.kind = Kind.TOP
    assert library.lakh_engine_check(graph) == 0
