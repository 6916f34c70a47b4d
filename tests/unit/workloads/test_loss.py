"""The chunked loss and its gradients equal those of full logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh.workloads.code.loss import linear_cross_entropy
from lakh.workloads.code.objective import Objective


def inputs(tokens: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randint(0, vocab, (tokens,), generator=generator)


@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(2, 50),
    logit_bytes=st.integers(1, 20_000),
    z=st.sampled_from([0.0, 0.1]),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_any_chunk_size_gives_the_loss_and_gradients_of_full_logits(
    tokens: int, vocab: int, logit_bytes: int, z: float, smoothing: float
) -> None:
    x, weight, targets = inputs(tokens, vocab, torch.float32)
    targets[tokens // 2 :: 3] = -100
    objective = Objective(z_loss=z, label_smoothing=smoothing)
    pieces = linear_cross_entropy(x, weight, targets, scale=0.5, objective=objective, logit_bytes=logit_bytes)
    logits = x @ weight.T
    counts = targets != -100
    whole = 0.5 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    whole = whole + 0.5 * z * (logits.logsumexp(-1) ** 2)[counts].sum()
    # float32 sums of up to 40 x 50 terms near 10: a few units in the last place.
    assert float(pieces.detach()) == pytest.approx(float(whole.detach()), rel=1e-5, abs=1e-5)
    for a, b in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (pieces, whole)), strict=True):
        assert torch.allclose(a, b, atol=2e-4, rtol=1e-4)


def test_gradients_keep_the_type_of_the_weight() -> None:
    x, weight, targets = inputs(8, 12, torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    loss = linear_cross_entropy(half, weight, targets, scale=1.0)
    grad_x, grad_weight = torch.autograd.grad(loss, (half, weight))
    assert (loss.dtype, grad_x.dtype, grad_weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_ignored_targets_have_no_gradient() -> None:
    x, weight, targets = inputs(6, 9, torch.float32)
    targets[:] = -100
    loss = linear_cross_entropy(x, weight, targets, scale=1.0, objective=Objective(z_loss=0.1, label_smoothing=0.1))
    assert float(loss.detach()) == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))
