"""The decoder is causal, has the parameters its spec counts, and starts with the same weights however it is built."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lakh.spec import Model
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.ops import ModelOps, apply_rotary, norm_add, rotary_tables

TIED = Model(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, context=32)
UNTIED = Model(layers=2, width=32, heads=4, kv_heads=4, ffn=48, vocab=64, context=32, tied=False)


def build(spec: Model, seed: int = 1) -> CodeModel:
    model = CodeModel(spec)
    init_weights(model, seed)
    return model


@pytest.mark.parametrize("spec", [TIED, UNTIED])
def test_the_network_has_the_parameters_its_spec_counts(spec: Model) -> None:
    assert sum(p.numel() for p in build(spec).parameters()) == spec.parameters


def test_a_fresh_model_predicts_uniformly() -> None:
    tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(build(TIED)(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(64), abs=0.1)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = build(TIED)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 63
    a, b = model(tokens), model(changed)
    assert torch.allclose(a[:, :10], b[:, :10], atol=1e-6)
    assert not torch.allclose(a[:, 10:], b[:, 10:], atol=1e-3)


def test_the_seed_decides_the_weights_and_nothing_else_does() -> None:
    torch.manual_seed(123)
    a = build(TIED)
    torch.manual_seed(456)
    b = build(TIED)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, build(TIED, seed=2).embed.weight)


def test_blocks_use_operations_that_fuse_norms_except_where_products_stay_in_bf16() -> None:
    calls: list[str] = []

    def norm_linear(x: Any, delta: Any, norm: Any, eps: float, weight: Any) -> Any:
        calls.append("norm and product")
        x, h = norm_add(x, delta, norm, eps)
        return x, F.linear(h, weight)

    def half_block(y: Any, weight: Any, x: Any, norm: Any, eps: float, gate_up: Any, down: Any) -> Any:
        calls.append("second half")
        x, h = norm_add(x, F.linear(y, weight), norm, eps)
        return x, ModelOps().feed_forward(h, gate_up, down)

    model, tokens = build(replace(TIED, layers=3)), torch.arange(16)[None]
    expected = model(tokens)
    fused = ModelOps(fused_norm_linear=norm_linear, fused_linear_norm_feed_forward=half_block)
    model.set_ops(fused)
    assert torch.equal(model(tokens), expected)
    assert calls == ["second half", *["norm and product", "second half"] * 2]  # the first block has no delta
    calls.clear()
    model.set_ops(replace(fused, bf16_layers=frozenset([0, 2])))
    assert torch.equal(model(tokens), expected)
    assert calls == ["norm and product", "second half"]


def test_rotation_depends_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, 1, 1, 8, generator=generator)

    def score(at_q: int, at_k: int) -> float:
        rope_q, rope_k = (rotary_tables(TIED, torch.tensor([[at]]))[0] for at in (at_q, at_k))
        return float((apply_rotary(q, rope_q) * apply_rotary(k, rope_k)).sum())

    assert score(5, 2) == pytest.approx(score(25, 22), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
