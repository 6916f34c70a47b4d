"""The size of a runner's KV cache, and the path of a step."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from lakh.errors import UserError
from lakh.server.model import runner as runner_module
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.launched_step import LaunchedStep
from lakh.server.model.runner import Runner, _num_blocks
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

GIB = 1 << 30
LARGE = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096)
TINY = Model(layers=2, width=128, heads=2, kv_heads=1, ffn=128, vocab=288, context=256)


def tokens(spec: Model, free_bytes: int | None, asked: int | None = None, most: int | None = None) -> int:
    device_type = "cpu" if free_bytes is None else "cuda"
    return _num_blocks(spec, device_type, spec.kv_bytes_per_token(2), asked, most, free_bytes) * BLOCK_TOKENS


def test_the_cache_takes_the_requested_or_most_of_the_free_memory() -> None:
    token_bytes = LARGE.kv_bytes_per_token(2)
    assert 24 * GIB < tokens(LARGE, 130 * GIB) * token_bytes < 24.01 * GIB
    assert 0.79 < tokens(LARGE, 10 * GIB) * token_bytes / (10 * GIB) < 0.81
    assert tokens(LARGE, None) == tokens(LARGE, None, asked=2 * GIB // token_bytes)


def test_cache_indexes_fit_32_bits() -> None:
    slots = tokens(TINY, 130 * GIB) + BLOCK_TOKENS  # and the block that no row owns
    assert slots * TINY.head_dim <= 1 << 31
    assert slots * TINY.kv_bytes_per_token(2) > 15 * GIB  # or nothing was in the way
    with pytest.raises(UserError, match="the GPU kernels support"):
        tokens(TINY, 130 * GIB, asked=(1 << 31) // TINY.head_dim)


def test_a_cache_larger_than_free_memory_is_rejected_before_allocation() -> None:
    with pytest.raises(UserError, match=r"cache of 100000 tokens: needs 9.2 GiB, and the GPU has 5.0 GiB free; lower"):
        tokens(LARGE, 5 * GIB, asked=100_000)
    with pytest.raises(UserError, match=r"cache of 4112 tokens.* smaller model"):  # one context
        tokens(LARGE, GIB // 8)


def test_a_draft_model_takes_the_remaining_memory() -> None:
    draft = Model(layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=32064, context=4096)
    for free_bytes in (10 * GIB, 20 * GIB, 28 * GIB, 130 * GIB):
        model = tokens(LARGE, free_bytes)
        left_bytes = free_bytes - model * LARGE.kv_bytes_per_token(2)
        found = tokens(draft, left_bytes, most=model)
        assert found <= model + BLOCK_TOKENS
        assert found * draft.kv_bytes_per_token(2) < 0.81 * left_bytes
    model = tokens(TINY, 130 * GIB)
    assert tokens(TINY, 90 * GIB, most=model) <= model


def test_steps_without_a_graph_are_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CodeModel(TINY)
    init_weights(model, 0)
    runner = Runner(TINY, model.state_dict(), 288, device=torch.device("cpu"), precision="f32", cache_tokens=256)
    now_s = [1000.0]
    monkeypatch.setattr(runner_module.time, "monotonic", lambda: now_s[0])
    small, large = SequenceChunk([1, 2], 0, [0, 1], 1), SequenceChunk([1, 2, 3], 0, [0, 1], 2)
    with caplog.at_level(logging.WARNING):
        runner.forward([large])  # a model without graphs: nothing to count
        logits = torch.zeros(1, 288)
        runner.decoder = SimpleNamespace(max_sequences=8)  # type: ignore[assignment]
        runner.prefill = SimpleNamespace(  # type: ignore[assignment]
            fits=lambda chunks: sum(len(chunk.tokens) for chunk in chunks) <= 2,
            launch=lambda chunks: LaunchedStep(logits, list),
        )
        assert runner.forward([small]) is logits
        assert runner.steps_without_graph == {"size": 0, "adapter": 0}
        assert len(runner.forward([large])) == 2
        now_s[0] += 59
        runner.forward([large])
        assert len(caplog.records) == 1
        assert "3 tokens in 1 sequences with 2 scored tokens exceeds the largest CUDA graph" in caplog.text
        now_s[0] += 2
        runner.forward([large])
    assert [record.args[-1] for record in caplog.records] == [1, 3]  # type: ignore[index]
    assert runner.steps_without_graph == {"size": 3, "adapter": 0}
