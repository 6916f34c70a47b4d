"""Learning rate schedules, AdamW and Muon, and the sum of gradients."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh.spec import Model, Optimizer
from lakh.trainer.optim.muon import orthogonalise
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.step import update
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights


def test_warm_up_then_cosine() -> None:
    settings = Optimizer(lr=0.1, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(step, settings, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[13] == pytest.approx(0.01)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@given(steps=st.integers(1, 50), warmup=st.integers(0, 50), ratio=st.floats(0, 1))
def test_the_learning_rate_stays_between_zero_and_its_peak(steps: int, warmup: int, ratio: float) -> None:
    settings = Optimizer(lr=0.5, warmup_steps=warmup, min_lr_ratio=ratio)
    for step in range(steps):
        assert 0 <= learning_rate(step, settings, steps) <= 0.5 * (1 + 1e-12)


def test_state_is_complete_before_the_first_step_and_norms_do_not_decay() -> None:
    model = CodeModel(Model(layers=1, width=8, heads=2, kv_heads=1, ffn=8, vocab=16, context=8))
    init_weights(model, 1)
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.5))
    before = named_state(model, optimizer)
    assert len(before) == 4 * len(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = named_state(model, optimizer)
    assert before.keys() == after.keys()
    assert torch.equal(model.norm.weight, torch.ones(8))
    assert all(float(value) == 1.0 for name, value in after.items() if name.endswith(".step"))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0] * 10),
        ("linear", [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("wsd", [1.0] * 8 + [0.55, 0.1]),
    ],
)
def test_schedules_at_known_steps(schedule: str, rates: list[float]) -> None:
    settings = Optimizer(lr=0.1, warmup_steps=0, min_lr_ratio=0.1, schedule=schedule, decay_share=0.3)  # type: ignore[arg-type]
    found = [learning_rate(step, settings, 10) / 0.1 for step in range(10)]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (24, 6)])
def test_orthogonalise_brings_every_singular_value_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    # Five rounds bring what is above 0.1 of the norm to 0.7..1.2; a random matrix of this size has none below.
    assert values.min() > 0.5
    assert values.max() < 1.3


def small_model() -> CodeModel:
    model = CodeModel(Model(layers=2, width=16, heads=2, kv_heads=1, ffn=24, vocab=32, context=16))
    init_weights(model, 1)
    return model


def test_muon_updates_the_matrices_of_blocks_and_the_loss_falls() -> None:
    model = small_model()
    optimizer = build_optimizer(model, Optimizer(kind="muon", lr=0.02))
    state = named_state(model, optimizer)
    assert "optim.embed.weight.exp_avg" in state
    assert any(name.startswith("optim.blocks.0.") and name.endswith(".momentum") for name in state)
    assert len({id(p) for group in optimizer.param_groups for p in group["params"]}) == len(list(model.parameters()))
    tokens = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_update_changes_nothing(kind: str) -> None:
    model = small_model()
    optimizer = build_optimizer(model, Optimizer(kind=kind))  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in named_state(model, optimizer).items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    for name, tensor in named_state(model, optimizer).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("is_exact", [False, True])
def test_sums_in_float64_do_not_depend_on_the_order_of_micro_batches(is_exact: bool) -> None:
    def trained(order: Sequence[int]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = CodeModel(Model(layers=2, width=32, heads=2, kv_heads=2, ffn=64, vocab=64, context=32))
        init_weights(model, 0)
        model.summed_ranks = 1 if is_exact else None
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        rows = torch.randint(0, 64, (8, 1, 33), generator=torch.Generator().manual_seed(1))
        batches = [Batch(inputs=row[:, :-1], targets=row[:, 1:]) for row in rows]
        update(model, optimizer, [batches[index] for index in order], lr=1e-3, clip_norm=1.0)
        return [parameter.detach() for parameter in model.parameters()]

    pairs = list(zip(trained(range(8)), trained([5, 2, 7, 0, 3, 6, 1, 4]), strict=True))
    assert all(torch.equal(*pair) for pair in pairs) == is_exact
    assert all(torch.allclose(*pair, atol=2e-3) for pair in pairs)
