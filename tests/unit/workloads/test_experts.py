"""Mixtures of experts: both ways to compute them agree, and only experts with tokens are read."""

import pytest
import torch

from lakh.workloads.code.ops import grouped_experts, looped_experts, run_experts


def make(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tokens, gate and up, down of four experts."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 32), (4, 32, 32), (4, 32, 16)]
    return [(0.3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.filterwarnings("ignore")  # on a CPU, a grouped product synchronizes
def test_one_grouped_product_equals_the_loop_with_its_gradients() -> None:
    counts, results = torch.tensor([10, 0, 9, 5]), []
    for function, dtype in ((grouped_experts, torch.bfloat16), (looped_experts, torch.float32)):
        parts = make(dtype)
        y = function(*parts, counts)
        (y.float() ** 2).sum().backward()
        results.append([y.detach().float(), *(part.grad.float() for part in parts if part.grad is not None)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))  # bf16 has 8 bits


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    x, gate_up, down = make(torch.float32)
    index = torch.tensor([[token % 3, 3] for token in range(24)])
    weight = torch.rand(24, 2, generator=torch.Generator().manual_seed(1))
    found = run_experts(x, gate_up, down, index, weight)
    for token in (0, 1, 23):
        one = [
            looped_experts(x[token : token + 1], gate_up[e][None], down[e][None], torch.tensor([1]))
            for e in index[token]
        ]
        expected = weight[token, 0] * one[0][0] + weight[token, 1] * one[1][0]
        assert torch.allclose(found[token], expected, atol=1e-6)


def test_experts_without_tokens_are_not_read() -> None:
    x, gate_up, down = (part.detach() for part in make(torch.float32))
    index, weight = torch.tensor([[0, 2]] * 24), torch.full((24, 2), 0.5)
    expected = run_experts(x, gate_up, down, index, weight)
    for unused in (1, 3):
        gate_up[unused], down[unused] = float("nan"), float("nan")
    assert torch.equal(run_experts(x, gate_up, down, index, weight), expected)
