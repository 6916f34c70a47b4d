"""Mixtures of experts on the GPU: grouped products and their Triton kernels compute what plain torch computes."""

import pytest
import torch

from lakh.spec import Data, Mesh, Model, Run, Training
from lakh.spec.model import Experts
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import update
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.kernels import experts
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.ops import run_experts
from lakh.workloads.code.parallel import ParallelGroups, parallelise

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"), pytest.mark.timeout(300)]

BF16 = 2**-8
EXPERTS = Experts(count=6, top_k=2, ffn=128)
SPEC = Model(layers=2, width=256, heads=4, kv_heads=2, ffn=128, vocab=512, context=128, experts=EXPERTS)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float().cpu() - b.detach().float().cpu()).norm() / b.detach().float().norm())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("width", [64, 200, 2304])
def test_kernels_equal_their_plain_forms(width: int) -> None:
    places = torch.randperm(96, generator=torch.Generator().manual_seed(0)).view(48, 2)
    rows, product, grad = normal(96, width), normal(96, 2 * width), normal(97, width)[:96]
    weight, order = torch.rand(96, generator=torch.Generator().manual_seed(1)), places.flatten()
    for function, parts in (
        (experts.gather_sum, (rows, places)),
        (experts.weighted_swiglu, (product, weight, order)),
        (experts.weighted_swiglu_backward, (grad, product, weight, order)),
    ):
        expected, found = function(*parts), function(*(part.cuda() for part in parts))
        pairs = [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
        for a, b in pairs:
            assert a.dtype == b.dtype
            assert distance(a, b) < BF16


@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_products_equal_the_loop_over_experts(compiled: bool) -> None:
    x, gate_up, down = normal(96, 128), 0.1 * normal(6, 128, 128), 0.1 * normal(6, 128, 64)
    scores = torch.randn(96, 6, generator=torch.Generator().manual_seed(2))
    scores[:, 3] = -10.0  # an expert without tokens
    weight, index = scores.softmax(-1).topk(2, dim=-1)
    grouped = torch.compile(experts.grouped_experts, fullgraph=True) if compiled else experts.grouped_experts
    results = []
    for function, dtype in ((grouped, torch.bfloat16), (run_experts, torch.float32)):
        parts = [part.to("cuda", dtype).detach().requires_grad_() for part in (x, gate_up, down)]
        parts.append(weight.cuda().requires_grad_())
        y = function(*parts[:3], index.cuda(), parts[3])
        y.float().square().sum().backward()
        results.append([y, *(part.grad for part in parts)])
    for found, expected in zip(*results, strict=True):
        assert distance(found, expected) < 4 * BF16


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_losses_of_compiled_training_are_those_of_the_cpu(recompute: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        run = Run(
            name="experts",
            model=SPEC,
            data=Data(sequence=128, batch=4, micro_batch=4),
            train=Training(device=device, recompute=recompute),  # type: ignore[arg-type]
        )

        def build() -> CodeModel:
            model = CodeModel(SPEC)
            init_weights(model, 1)
            return model

        on = torch.device(device)
        model = parallelise(run, Mesh(), ParallelGroups(), build, bf16=device == "cuda", device=on)
        optimizer = build_optimizer(model, run.optim)
        tokens = torch.randint(0, SPEC.vocab, (4, 129), generator=torch.Generator().manual_seed(1)).to(on)
        batch = Batch(tokens[:, :-1], tokens[:, 1:])
        found.append([float(update(model, optimizer, [batch], lr=1e-3).loss) for _ in range(8)])
    expected, fast = found
    assert expected[-1] < expected[0] - 0.1
    assert fast == pytest.approx(expected, abs=0.03)  # bf16 products
