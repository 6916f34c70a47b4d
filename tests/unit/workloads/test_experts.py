"""Mixtures of experts: both ways to compute them agree, and only experts with tokens are read."""

import pytest
import torch
import torch.distributed as dist

from lakh.workloads.code.kernels.experts import grouped_experts
from lakh.workloads.code.ops import ModelOps, looped_experts, run_experts
from lakh.workloads.code.parallelism.expert import ExpertExchange


def make(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tokens, gate and up, down of four experts."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 32), (4, 32, 32), (4, 32, 16)]
    return [(0.3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts of each of 24 tokens, and their weights; the second expert has no tokens."""
    scores = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    scores[:, 1] = -9.0
    weight, index = scores.softmax(-1).topk(2, dim=-1)
    return index, weight


@pytest.mark.filterwarnings("ignore")  # on a CPU, a grouped product synchronizes
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_grouped_products_equal_the_loop_with_all_gradients(compiled: bool) -> None:
    results = []
    grouped = torch.compile(grouped_experts, fullgraph=True, backend="aot_eager") if compiled else grouped_experts
    for function, dtype in ((grouped, torch.bfloat16), (run_experts, torch.float32)):
        index, weight = routed()
        parts = [*make(dtype), weight.requires_grad_()]
        y = function(*parts[:3], index, weight)
        (y.float() ** 2).sum().backward()
        results.append([y.detach().float(), *(part.grad.float() for part in parts if part.grad is not None)])
    assert len(results[0]) == 5
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))  # bf16 has 8 bits


def test_grouped_products_keep_one_product_for_the_backward_pass() -> None:
    index, weight = routed()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        parts = make(torch.bfloat16)
        grouped_experts(*parts, index, weight)
    sizes = {tuple(tensor.shape) for tensor in kept if tensor.is_floating_point()}
    assert sizes == {(24, 32), (4, 32, 32), (4, 32, 16), (24, 2), (48, 32)}  # inputs, and the gate-up product


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


@pytest.fixture
def group(tmp_path):
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kept", ["all", "some", "none"])
def test_exchanged_tokens_equal_those_at_home_with_all_gradients(kept: str, group) -> None:
    """Choices without a weight are not sent, and gradients are zeros where no token arrives."""
    results = []
    for function in (ExpertExchange(ModelOps(), group).run, run_experts):
        index, weight = routed()
        weight = {"all": weight, "some": weight * (weight > 0.4), "none": weight * 0}[kept].requires_grad_()
        parts = [*make(torch.float32), weight]
        y = function(*parts[:3], index, weight)
        (y**2).sum().backward()
        grads = [part.grad for part in parts[:3]]
        assert all(grad is not None for grad in grads)
        results.append([y.detach(), *grads])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
    assert results[0][0].any() == (kept != "none")
