"""Low-rank adapters on the GPU: compiled blocks over a frozen bf16 base train as float32 on the CPU does.

Without a GPU, Triton's interpreter can run the kernels in float32: TRITON_INTERPRET=1, where Triton and a NumPy before
2.4 are installed.
"""

import os

import pytest
import torch

from lakh.spec import Adapter, Data, Mesh, Model, Run, Training
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import update
from lakh.workloads.code.adapters import add_adapters
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallel import ParallelGroups, parallelise

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_gpu_or_interpreter = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"
)
pytestmark = pytest.mark.timeout(300)
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
"""Of products: Triton's interpreter has none of bf16."""
ROUNDING = 1e-5 if INTERPRETED else 2**-8
"""Relative, of results that are rounded once."""

SPEC = Model(layers=2, width=256, heads=4, kv_heads=2, ffn=384, vocab=512, context=128)


def losses(device: str) -> list[float]:
    run = Run(
        name="a",
        model=SPEC,
        init_from="built below",
        data=Data(sequence=128, batch=4, micro_batch=4),
        train=Training(device=device),  # type: ignore[arg-type]
        adapter=Adapter(rank=8),
    )

    def build() -> CodeModel:
        model = CodeModel(SPEC)
        init_weights(model, 1)
        add_adapters(model, run.adapter, 1)
        return model

    on = torch.device(device)
    model = parallelise(run, Mesh(), ParallelGroups(), build, bf16=device == "cuda", device=on)
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad and p.dim() == 2}
    assert frozen == {torch.bfloat16 if device == "cuda" else torch.float32}
    optimizer = build_optimizer(model, run.optim)
    tokens = torch.randint(0, SPEC.vocab, (4, 129), generator=torch.Generator().manual_seed(1)).to(on)
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    return [float(update(model, optimizer, [batch], lr=3e-3).loss) for _ in range(12)]


@needs_gpu
def test_losses_on_the_gpu_are_those_of_the_cpu() -> None:
    expected, found = losses("cpu"), losses("cuda")
    assert expected[-1] < expected[0] - 0.1  # the adapters learn
    assert found == pytest.approx(expected, abs=0.03)  # bf16 products


@needs_gpu
@pytest.mark.parametrize(("tokens", "rank"), [(200, 8), (512, 16), (200, 128), (200, 300)])  # 600 together: no kernels
def test_an_adapted_feed_forward_is_that_of_plain_products(tokens: int, rank: int) -> None:
    from lakh.workloads.code.kernels.low_rank import AdaptedMatrix, low_rank_feed_forward

    generator = torch.Generator("cuda").manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator) * shape[-1] ** -0.5

    width, ffn = 256, 344
    shapes = {"x": (tokens, width), "a_gate": (rank, width), "b_gate": (ffn, rank)}
    shapes |= {"a_up": (rank, width), "b_up": (ffn, rank), "a2": (rank, ffn), "b2": (width, rank)}
    exact = [normal(*shape).bfloat16().float().requires_grad_() for shape in shapes.values()]
    fast = [value.detach().bfloat16().requires_grad_() for value in exact]
    w1, w2, grad = (normal(*shape).bfloat16() for shape in ((2 * ffn, width), (width, ffn), (tokens, width)))
    x, a_gate, b_gate, a_up, b_up, a2, b2 = exact
    gate, up = x @ (w1[:ffn].float() + 0.5 * b_gate @ a_gate).mT, x @ (w1[ffn:].float() + 0.5 * b_up @ a_up).mT
    expected = (torch.nn.functional.silu(gate) * up) @ (w2.float() + 2 * b2 @ a2).mT
    gate_up = AdaptedMatrix(w1, [fast[1], fast[3]], [fast[2], fast[4]], [0, ffn], 0.5)
    found = low_rank_feed_forward(fast[0], gate_up, AdaptedMatrix(w2, [fast[5]], [fast[6]], [0], 2.0))
    pairs = zip(
        (found, *torch.autograd.grad(found, fast, grad)),
        (expected, *torch.autograd.grad(expected, exact, grad.float())),
        strict=True,
    )
    for name, (a, b) in zip(("y", *shapes), pairs, strict=True):
        assert float((a.float() - b).detach().norm() / b.detach().norm()) < 0.02, name


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape) + seed)
    return torch.randn(*shape, device=DEVICE, generator=generator)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@needs_gpu_or_interpreter
@pytest.mark.parametrize(("tokens", "rank"), [(200, 8), (1024, 16), (1000, 5)])
def test_adapters_are_packed_and_their_gradients_summed_as_plain_torch_does(tokens: int, rank: int) -> None:
    from lakh.workloads.code.kernels import low_rank, triton_low_rank

    inputs, sizes, starts, outputs = 264, (256, 64, 72), (0, 256, 328), 400
    a, b = [normal(rank, inputs, seed=size) for size in sizes], [normal(size, rank) for size in sizes]
    packed = normal(3 * rank, 2 * inputs).to(DTYPE)[:, :inputs], normal(outputs, 4 * rank).to(DTYPE)[:, : 3 * rank]
    triton_low_rank.pack(a, b, starts, 0.5, *packed)
    assert all(map(torch.equal, packed, low_rank._stacked(a, b, starts, 0.5, outputs, DTYPE)))
    x, low, grad, grad_low = (normal(tokens, size).to(DTYPE) for size in (inputs, 3 * rank, outputs, 3 * rank))
    thin = triton_low_rank.thin_product(low, packed[0])
    assert distance(thin, low.double() @ packed[0].double()) < ROUNDING
    for matrix in (packed[1], packed[1].mT.contiguous().mT):  # both orders in memory
        beside = torch.full((tokens, outputs + 3 * rank + 1), torch.nan, device=DEVICE, dtype=DTYPE)
        product = triton_low_rank.copy_with_product(grad, matrix, beside)
        assert distance(product, grad.double() @ matrix.double()) < ROUNDING
        assert torch.equal(beside[:, :-1], torch.cat((grad, product), dim=1))
        assert beside[:, -1].isnan().all()
    sums = [low_rank.sum_of_a(x, grad_low), *low_rank.sums_of_b(grad, low, b, starts, 0.5)]
    found = triton_low_rank.sums_over_tokens([triton_low_rank.TokenSum(*one) for one in sums])
    exact = [one._replace(wide=one.wide.double().cpu(), narrow=one.narrow.double().cpu()) for one in sums]
    expected = low_rank.split_flat(low_rank.sums_over_tokens(exact), a, b)
    for ours, plain in zip(low_rank.split_flat(found, a, b), expected, strict=True):
        for one, other in zip(ours, plain, strict=True):
            assert one.dtype == torch.float32
            assert torch.allclose(one.cpu(), other, atol=1e-4 * tokens**0.5)


@needs_gpu_or_interpreter
@pytest.mark.parametrize(
    ("tokens", "ffn", "rank", "starts"),
    [(200, 344, 8, (0, 344)), (70, 72, 5, (0, 72)), (64, 128, 16, (128,)), (130, 128, 16, (0,))],
)
def test_products_of_an_activation_and_of_its_gradient_are_those_of_plain_torch(
    tokens: int, ffn: int, rank: int, starts: tuple[int, ...]
) -> None:
    """The kernels that multiply what they write: gate and up, or one of them, have adapters."""
    from lakh.workloads.code.kernels import low_rank, triton_low_rank

    product, grad = normal(tokens, 2 * ffn).to(DTYPE), normal(tokens, ffn).to(DTYPE)
    a = normal(rank, 2 * ffn).to(DTYPE)[:, :ffn]
    beside = torch.full((tokens, ffn + rank + 1), torch.nan, device=DEVICE, dtype=DTYPE)
    low_2 = triton_low_rank.swiglu_with_product(product, a.mT, beside)
    exact = torch.empty(tokens, ffn + rank, dtype=torch.float64)
    low_rank.swiglu_with_product(product.double().cpu(), a.mT.double().cpu(), exact)
    assert distance(beside[:, :ffn].cpu(), exact[:, :ffn]) < ROUNDING
    assert distance(low_2.cpu(), exact[:, ffn:]) < 2 * ROUNDING  # of rounded numbers, and rounded
    assert torch.equal(beside[:, ffn:-1], low_2)
    assert beside[:, -1].isnan().all()

    num, b = len(starts), [normal(ffn, rank) for _ in starts]
    low, grad_low = normal(tokens, num * rank + 3).to(DTYPE)[:, : num * rank], normal(tokens, rank + 1).to(DTYPE)[:, 1:]
    found = torch.full((tokens, 2 * ffn + 1), torch.nan, device=DEVICE, dtype=DTYPE)
    flat = triton_low_rank.swiglu_backward(grad, product, found[:, :-1], low, grad_low, starts, 0.5)
    operands = (grad, product, torch.empty(tokens, 2 * ffn), low, grad_low)
    _, _, expected, *_ = exacts = [one.double().cpu() for one in operands]
    expected_flat = low_rank.swiglu_backward(*exacts, b, starts, 0.5)
    assert distance(found[:, :-1].cpu(), expected) < ROUNDING
    assert found[:, -1].isnan().all()
    assert flat.dtype == torch.float32
    sizes = [one.numel() for one in (*b, a)]
    for one, other in zip(flat.cpu().split(sizes), expected_flat.split(sizes), strict=True):
        assert distance(one, other) < ROUNDING


@needs_gpu_or_interpreter
def test_the_sweep_tries_settings_and_leaves_them_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.train.adapter_sweep import adapter_kernels

    from lakh.workloads.code.kernels import triton_low_rank

    before = triton_low_rank._GATED, triton_low_rank._GATED_BACKWARD, triton_low_rank._GATED_PARTS
    adapter_kernels(tiny=True)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("swiglu_with_product {") for line in lines) == 2
    assert sum(line.startswith("swiglu_backward {") for line in lines) == 2
    assert not any("Error" in line for line in lines)
    assert before == (triton_low_rank._GATED, triton_low_rank._GATED_BACKWARD, triton_low_rank._GATED_PARTS)


@needs_gpu
@pytest.mark.parametrize("tokens", [200, 1024])
def test_halves_of_an_adapted_block_are_those_of_the_cpu(tokens: int) -> None:
    """In bf16 on the GPU, and in float32 by plain torch."""
    from lakh.workloads.code.kernels import low_rank_block
    from lakh.workloads.code.kernels.low_rank import AdaptedMatrix

    width, heads, ffn, rank = 256, 128, 344, 8
    parts = {
        "qkv": (width, (192, 64, 64)),
        "o": (heads, (width,)),
        "gate_up": (width, (ffn, ffn)),
        "down": (ffn, (width,)),
    }
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        generator = torch.Generator().manual_seed(tokens)

        def normal(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5  # noqa: B023
            return values.bfloat16().to(device, dtype)  # noqa: B023

        x, delta, y = (normal(tokens, size).requires_grad_() for size in (width, width, heads))
        norm, trained, matrices = normal(width).float() + 1, [x, delta, y], {}
        for name, (inputs, sizes) in parts.items():
            wide = low_rank_block.widened(normal(sum(sizes), inputs), rank * len(sizes))
            a = [normal(rank, inputs).float().requires_grad_() for _ in sizes]
            b = [normal(size, rank).float().requires_grad_() for size in sizes]
            starts = [sum(sizes[:number]) for number in range(len(sizes))]
            matrices[name] = AdaptedMatrix(wide[: sum(sizes), :inputs], a, b, starts, 0.5, None, wide)
            trained += [*a, *b]
        total, qkv = low_rank_block.low_rank_norm_linear(x, delta, norm, 1e-5, matrices["qkv"])
        others = (matrices[name] for name in ("gate_up", "down"))
        last = low_rank_block.low_rank_linear_norm_feed_forward(y, matrices["o"], total, norm, 1e-5, *others)
        outputs = (qkv, *last)
        grads = torch.autograd.grad(outputs, trained, [normal(*output.shape) for output in outputs])
        results.append([*outputs, *grads])
    for found, expected in zip(results[1], results[0], strict=True):
        assert float((found.detach().cpu().float() - expected.detach()).norm() / expected.detach().norm()) < 0.02
