"""The decoder is causal, has the parameters its spec counts, and starts with the same weights however it is built."""

import math

import pytest
import torch
import torch.nn.functional as F

from lakh.spec import Model
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.ops import apply_rotary, rotary_tables

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


def test_rotation_depends_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, 1, 1, 8, generator=generator)

    def score(at_q: int, at_k: int) -> float:
        rope_q, rope_k = (rotary_tables(TIED, torch.tensor([[at]])) for at in (at_q, at_k))
        return float((apply_rotary(q, rope_q) * apply_rotary(k, rope_k)).sum())

    assert score(5, 2) == pytest.approx(score(25, 22), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
