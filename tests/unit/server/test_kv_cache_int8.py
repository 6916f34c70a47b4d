"""The 8-bit KV cache: the same text up to rounding, in every path, in a quarter of the memory of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lakh.errors import UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.runner import Runner

from .conftest import random_weights, tiny_spec

CPU = torch.device("cpu")
PROMPT = "def add(left, right):\n    return left + right\n"


def make_int8(make_engine: Callable[..., Engine], **changes: Any) -> Engine:
    return make_engine(options={"kv_dtype": "int8"}, **changes)


def test_numbers_survive_to_one_part_in_254_of_the_largest() -> None:
    spec = tiny_spec()
    cache = PagedCache(spec, 3, device=CPU, dtype=torch.int8)
    x = torch.randn(spec.kv_heads, 20, spec.head_dim, generator=torch.Generator().manual_seed(1)) * 7
    x[:, 3] = 0
    slots = torch.arange(5, 25)
    cache.keys(1).write(slots, x)
    found = cache.keys(1).read(slots)
    assert ((found - x).abs() <= x.abs().amax(dim=-1, keepdim=True) / 254 + 1e-6).all()
    assert not cache.values(1).read(slots).any()
    cache.copy_block(0, 2)
    moved = torch.arange(2 * BLOCK_TOKENS + 5, 3 * BLOCK_TOKENS)
    assert torch.equal(cache.keys(1).read(moved), cache.keys(1).read(torch.arange(5, BLOCK_TOKENS)))


def test_bfloat16_numbers_keep_their_signs() -> None:
    """With a scale of bfloat16 the largest number could become 128, which is -128 in int8."""
    spec = tiny_spec()
    cache = PagedCache(spec, 65, device=CPU, dtype=torch.int8)
    slots = torch.arange(1024)
    x = torch.randn(spec.kv_heads, len(slots), spec.head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    cache.keys(0).write(slots, x)
    found = cache.keys(0).read(slots, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert ((found - x).abs() <= x.abs().amax(dim=-1, keepdim=True) / 100).all()


def test_generic_path_in_bfloat16_reads_what_it_writes() -> None:
    """The path of models and steps for which a GPU has no kernels."""
    spec = tiny_spec()
    weights = random_weights(spec)
    chunk = SequenceChunk(list(range(20, 50)), 0, [0, 1], 30)
    logits = []
    for kv_dtype in ("auto", "int8"):
        options: Any = {"kv_dtype": kv_dtype, "cache_tokens": 256}
        runner = Runner(spec, weights, 300, device=CPU, precision="bf16", **options)
        logits.append(runner.forward([chunk]).float())
    plain, int8 = logits
    assert not torch.equal(int8, plain)
    assert (int8 - plain).abs().max() < 0.2 * plain.std()


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_all_paths_read_and_write_the_same_numbers(num_tokens: int) -> None:
    """The native call and the generic path, in one chunk and in short ones."""
    spec = tiny_spec()
    runner = Runner(spec, random_weights(spec), 300, device=CPU, precision="f32", cache_tokens=256, kv_dtype="int8")
    ids = torch.randint(0, 300, (num_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    blocks, decoder = list(range(4)), runner.network._decoder
    assert decoder is not None

    def last_logits(step: int, is_native: bool) -> tuple[torch.Tensor, torch.Tensor]:
        runner.network._decoder = decoder if is_native else None
        for start in range(0, num_tokens, step):
            chunk = SequenceChunk(ids[start : start + step], start, blocks)
            logits = runner.network.forward([chunk], runner.cache)
        assert runner.cache.key_scales_LKC is not None
        return logits[-1], runner.cache.key_scales_LKC[:, :, :num_tokens].clone()

    whole, scales = last_logits(num_tokens, is_native=False)
    for step, is_native in ((1, False), (1, True), (3, True), (3, False)):
        logits, other_scales = last_logits(step, is_native)
        assert torch.allclose(scales, other_scales, rtol=2e-2)
        # Rounding of a sum may move a number by one of its 254 steps.
        assert (logits - whole).abs().max() < 0.05 * whole.std()


def test_completions_differ_from_float32_by_rounding_only(make_engine: Callable[..., Engine]) -> None:
    """Random weights put tokens close together: compare scores, not texts."""
    plain, int8 = make_engine(), make_int8(make_engine)
    sampling = SamplingParams(max_tokens=1, logprobs=5)
    (expected,), (found,) = plain.generate([PROMPT], sampling), int8.generate([PROMPT], sampling)
    assert expected.logprobs is not None
    assert found.logprobs is not None
    assert found.tokens == expected.tokens
    assert found.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=0.2)
    assert found.logprobs[0].logprob != expected.logprobs[0].logprob  # it is in use


def test_batches_prefixes_and_preemption_give_the_same_text(make_engine: Callable[..., Engine]) -> None:
    sampling = SamplingParams(max_tokens=12)
    prompts = [PROMPT, PROMPT + "x", "class "]
    engine = make_int8(make_engine)
    together = engine.generate(prompts, sampling)
    again = engine.generate(prompts, sampling)  # from cached prefixes
    assert engine.counters.cached_tokens > 0
    assert [one.text for one in again] == [one.text for one in together]
    alone = [make_int8(make_engine).generate([prompt], sampling)[0].text for prompt in prompts]
    assert [one.text for one in together] == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_keys_and_values_begin_at_a_cache_line(dtype: torch.dtype) -> None:
    for blocks in (1, 3, 1000):
        cache = PagedCache(tiny_spec(), blocks, device=torch.device("cpu"), dtype=dtype)
        assert cache.keys_LKCD.data_ptr() % 64 == 0
        assert cache.values_LKCD.data_ptr() % 64 == 0


def test_it_takes_a_quarter_of_the_memory() -> None:
    spec = tiny_spec(width=256, heads=4, kv_heads=2)  # heads of 64
    sizes = {}
    for dtype in (torch.float32, torch.int8):
        cache = PagedCache(spec, 4, device=CPU, dtype=dtype)
        assert cache.arrays is not None
        sizes[dtype] = sum(array.nbytes for array in cache.arrays)
    assert sizes[torch.float32] / sizes[torch.int8] == pytest.approx(256 / 68)


def test_it_is_refused_where_it_does_not_exist(make_engine: Callable[..., Engine]) -> None:
    spec = tiny_spec()
    with pytest.raises(UserError, match="is not implemented for tensor parallelism"):
        Runner(
            spec,
            random_weights(spec),
            300,
            device=CPU,
            precision="f32",
            team=_Team(),
            kv_dtype="int8",  # type: ignore[arg-type]
        )


class _Team:
    from lakh.server.model.inference import ModelShard

    shard = ModelShard()
