"""Routing to experts: the auxiliary loss has its gradient, the bias evens the load, and both leave the rest alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lakh.errors import ConfigError, UserError
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec import Run
from lakh.spec.model import Experts, Latent, Model
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import update
from lakh.workloads.code.architectures import shapes
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.formats import hf
from lakh.workloads.code.formats.hf import config as hf_config
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.ops import ModelOps
from lakh.workloads.code.routing import route

EXPERTS = Experts(count=4, top_k=2, ffn=16)
SPEC = Model(layers=3, width=32, heads=2, kv_heads=1, ffn=48, vocab=64, context=32, experts=EXPERTS)
SHARED = replace(SPEC, experts=replace(EXPERTS, shared=2, dense_layers=1, balance_bias=0.02))


def make(spec: Model) -> CodeModel:
    model = CodeModel(spec)
    init_weights(model, 1)
    return model


def batch(seed: int = 0, sequences: int = 4) -> Batch:
    rows = torch.randint(0, SPEC.vocab, (sequences, 33), generator=torch.Generator().manual_seed(seed))
    return Batch(rows[:, :-1], rows[:, 1:])


def test_the_auxiliary_loss_adds_its_own_gradient_and_not_its_value() -> None:
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    target = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weight, index, share = route(replace(EXPERTS, balance_loss=0.3), ModelOps(balance_scale=0.5), found, None)
    (weight * target).sum().backward()

    plain, plain_index, _ = route(EXPERTS, ModelOps(), expected, None)
    chosen = torch.zeros(20, 4).scatter_(1, plain_index, 1.0)
    auxiliary = 4 * ((chosen.sum(0) / 40) * expected.softmax(-1).mean(0)).sum()
    ((plain * target).sum() + 0.3 * 0.5 * auxiliary).backward()
    assert torch.equal(weight.detach(), plain.detach())
    assert torch.equal(index, plain_index)
    assert share is not None
    assert share.sum() == pytest.approx(1)
    assert torch.allclose(found.grad, expected.grad, atol=1e-6)


def test_the_bias_chooses_experts_and_does_not_change_their_weights() -> None:
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    weight, index, _ = route(EXPERTS, ModelOps(), logits, bias)
    assert (index == 3).any(1).all()
    scores = logits.softmax(-1).gather(1, index)
    assert torch.allclose(weight, scores / scores.sum(1, keepdim=True))


def test_the_bias_evens_the_load_of_a_skewed_router() -> None:
    busiest = {}
    for step_size in (0.0, 0.02):
        spec = replace(SPEC, layers=1, experts=replace(EXPERTS, balance_bias=step_size))
        model = make(spec)
        with torch.no_grad():  # every token prefers the first expert
            model.get_parameter("blocks.0.ffn.router.weight")[0] = model.get_parameter("embed.weight").mean(0) * 40
        optimizer = build_optimizer(model, Run(name="balance").optim)
        block = next(model.each_block())
        for step in range(60):
            assert block.load is not None
            block.load.zero_()
            update(model, optimizer, [batch(step), batch(100 + step)], lr=1e-5)
        busiest[step_size] = float(block.load.max() / block.load.mean())
    assert busiest[0.0] > 1.5
    assert busiest[0.02] < 1.25


def test_the_bias_is_no_part_of_the_gradient_norm_and_waits_for_an_applied_update() -> None:
    spec = replace(SPEC, experts=replace(EXPERTS, balance_bias=0.02))
    norms = []
    for each in (SPEC, spec):
        model = make(each)
        optimizer = build_optimizer(model, Run(name="balance").optim)
        norms.append(float(update(model, optimizer, [batch()], lr=1e-3).grad_norm))
    assert norms[0] == norms[1]
    name = "blocks.0.ffn.router_bias.weight"
    moved = model.get_parameter(name).detach().clone()
    assert moved.abs().max() == pytest.approx(0.02)
    update(model, optimizer, [batch()], lr=1e-3, max_norm=0.0)  # refused: the norm is too large
    assert torch.equal(model.get_parameter(name), moved)


SIGMOID = Model(
    layers=2, width=32, heads=2, kv_heads=2, ffn=48, vocab=64, context=32, family="deepseek_v3",
    experts=Experts(count=8, top_k=2, ffn=16, shared=1, groups=4, top_groups=2),
    latent=Latent(kv_rank=16, rope_dim=4),
)  # fmt: skip


def test_the_bias_of_sigmoid_scores_moves_only_where_it_has_a_step() -> None:
    """It is that of a checkpoint; training changes it if asked to, and Adam does not."""
    name = "blocks.0.ffn.router_bias.weight"
    for step in (0.0, 0.02):
        model = make(replace(SIGMOID, experts=replace(SIGMOID.experts, balance_bias=step)))  # type: ignore[type-var]
        bias = torch.linspace(-0.1, 0.1, 8)
        with torch.no_grad():
            model.get_parameter(name).copy_(bias)
        router = model.get_parameter("blocks.0.ffn.router.weight").detach().clone()
        optimizer = build_optimizer(model, Run(name="balance").optim)
        update(model, optimizer, [batch()], lr=1e-3)
        moved = (model.get_parameter(name).detach() - bias).abs().max()
        assert moved == pytest.approx(step, abs=1e-6)
        assert not torch.equal(model.get_parameter("blocks.0.ffn.router.weight"), router)


def test_the_auxiliary_loss_of_sigmoid_scores_is_of_their_shares() -> None:
    """As in DeepSeek-V3: the scores of a token are divided by their sum."""
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    experts = replace(EXPERTS, balance_loss=0.3)
    weight, index, _ = route(experts, ModelOps(balance_scale=0.5), found, None, is_sigmoid=True)
    (weight * 0).sum().backward()
    chosen = torch.zeros(20, 4).scatter_(1, index, 1.0)
    shares = expected.sigmoid() / expected.sigmoid().sum(-1, keepdim=True)
    (0.3 * 0.5 * 4 * ((chosen.sum(0) / 40) * shares.mean(0)).sum()).backward()
    assert torch.allclose(found.grad, expected.grad, atol=1e-6)


def test_a_token_chooses_experts_of_the_groups_with_the_best_pairs() -> None:
    logits = torch.tensor([[5.0, -5.0, 2.0, 2.0, 1.0, -9.0, 1.5, 1.9]])  # sums of pairs by group: 1.0, 1.76, 0.73, 1.69
    experts = Experts(count=8, top_k=3, ffn=16, groups=4, top_groups=2, weight_scale=2.5)
    weight, index, _ = route(experts, ModelOps(), logits, None, is_sigmoid=True)
    assert sorted(index[0].tolist()) == [2, 3, 7]  # not the first, whose score is the largest
    assert weight.sum() == pytest.approx(2.5)


def test_shared_experts_and_dense_layers_have_their_parameters() -> None:
    model = make(SHARED)
    assert sum(p.numel() for p in model.parameters()) == SHARED.parameters
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes(SHARED)
    first = {name for name, _ in model.blocks["0"].named_parameters()}
    second = {name for name, _ in model.blocks["1"].named_parameters()}
    assert {name for name in first ^ second if "dense" not in name} == {
        f"ffn.{name}.weight"
        for name in ("router", "router_bias", "gate", "up", "down", "shared_gate", "shared_up", "shared_down")
    }


def test_shared_experts_are_added_to_those_that_the_router_chose() -> None:
    """A shared expert is an expert that every token goes to, with the weight 1."""
    spec = replace(SPEC, layers=1, experts=replace(EXPERTS, shared=1))
    with_shared, without = make(spec), make(replace(spec, experts=EXPERTS))
    with torch.no_grad():
        for name, parameter in without.named_parameters():
            parameter.copy_(with_shared.get_parameter(name))
        h = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
        block, plain = with_shared.blocks["0"], without.blocks["0"]
        rope = (torch.ones(1, 5, 1, 16), torch.zeros(1, 5, 1, 16))
        (x, y), (x_plain, y_plain) = block(h, None, rope), plain(h, None, rope)
        normed = torch.nn.functional.rms_norm(x, (32,), block.ffn_norm.weight, spec.norm_eps)
        gate, up = normed @ block.ffn.shared_gate.weight.T, normed @ block.ffn.shared_up.weight.T
        expected = (torch.nn.functional.silu(gate) * up) @ block.ffn.shared_down.weight.T
    assert torch.equal(x, x_plain)
    assert torch.allclose(y - y_plain, expected, atol=1e-6)


def test_the_server_computes_shared_experts_dense_layers_and_the_bias() -> None:
    model = make(SHARED)
    with torch.no_grad():
        for layer in (1, 2):
            model.get_parameter(f"blocks.{layer}.ffn.router_bias.weight").copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    network = InferenceModel(SHARED, weights, SHARED.vocab, torch.device("cpu"), "f32")
    assert network.has_finite_weights()
    ids = torch.randint(0, SHARED.vocab, (1, 20), generator=torch.Generator().manual_seed(2))
    cache = PagedCache(SHARED, 4, device=torch.device("cpu"), dtype=torch.float32)
    found = network.forward([SequenceChunk(ids[0].tolist(), 0, [0, 1], 20)], cache)
    with torch.no_grad():
        assert torch.allclose(found, model(ids)[0], atol=1e-4)


def test_what_a_format_cannot_say_is_refused(tmp_path: Path) -> None:
    weights = {name: tensor.detach() for name, tensor in make(SHARED).state_dict().items()}
    with pytest.raises(UserError, match=r"experts\.shared.*MixtralForCausalLM does not have it"):
        hf.save(tmp_path / "out", SHARED, weights, None)
    for family, normalize in (("mixtral", False), ("deepseek_v2", True)):
        other = replace(SIGMOID, latent=None if family == "mixtral" else SIGMOID.latent, family=family)
        other = replace(other, experts=replace(EXPERTS, normalize=normalize))
        with pytest.raises(UserError, match=f"experts.normalize.*is {normalize}, and .* does not have it"):
            hf_config.config_of(other, torch.float32, {})
    with pytest.raises(ConfigError, match="balance_loss"):
        replace(EXPERTS, balance_loss=-1.0)


def test_choices_beyond_the_capacity_are_dropped_from_the_smallest_weight_on() -> None:
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    logits[:, 0] += 2.0  # most tokens choose the first expert
    weight, index, _ = route(EXPERTS, ModelOps(), logits, None)
    kept, same, _ = route(replace(EXPERTS, capacity=0.55), ModelOps(), logits, None)
    assert torch.equal(index, same)
    most = 6  # 0.55 of an even share of 10
    for expert in range(4):
        mine = index == expert
        expected = weight[mine].sort(descending=True).values[:most]
        found = kept[mine].sort(descending=True).values
        assert torch.equal(found[: len(expected)], expected)
        assert not found[len(expected) :].any()
    assert (kept == 0).any()
    with torch.no_grad():  # evaluation drops nothing
        assert torch.equal(route(replace(EXPERTS, capacity=0.55), ModelOps(), logits, None)[0], weight)
