"""The learning rate over time, and an optimizer whose state exists from the start."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh.spec import Model, Optimizer
from lakh.trainer.optim import build_optimizer, learning_rate, named_state
from lakh.workloads.code.model import CodeModel, init_weights


def test_warm_up_then_cosine_by_hand() -> None:
    settings = Optimizer(lr=0.1, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(step, settings, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[13] == pytest.approx(0.01)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@given(steps=st.integers(1, 50), warmup=st.integers(0, 50), ratio=st.floats(0, 1))
def test_the_rate_stays_between_zero_and_its_peak(steps: int, warmup: int, ratio: float) -> None:
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
