"""On a GPU: the fused kernels compute what the plain operations do. Skipped without one."""

from dataclasses import replace

import pytest
import torch

from lakh.spec import Data, Model, Optimizer, Run, Training
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.step import plain_pass, update
from lakh.trainer.tuning.cuda_graphs import GraphedPass
from lakh.workloads.code.acceleration import choose_ops
from lakh.workloads.code.attention import KERNELS, Documents
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.loss import _cross_entropy, linear_cross_entropy
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.objective import Objective
from lakh.workloads.code.ops import rotary_tables, split_rotary, swiglu

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

# bf16 keeps 8 bits of mantissa: results that are rounded once differ by up to 2^-8 of their size.
BF16 = 2**-8
SPEC = Model(layers=2, width=256, heads=4, kv_heads=2, ffn=344, vocab=515, context=256, tied=False)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape))).to(dtype)


def test_swiglu_is_silu_of_the_gate_times_up() -> None:
    from lakh.workloads.code.kernels import triton as kernels

    x, grad = normal(3, 70, 2 * 344).requires_grad_(), normal(3, 70, 344)
    fast, plain = kernels.swiglu(x), swiglu(x.float())
    assert distance(fast, plain) < BF16
    assert distance(*(torch.autograd.grad(y, x, g)[0] for y, g in ((fast, grad), (plain, grad.float())))) < BF16


@pytest.mark.parametrize("width", [256, 768, 1000, 2048])
def test_add_norm_is_the_sum_and_its_norm(width: int) -> None:
    from lakh.workloads.code.kernels import triton as kernels

    x, delta, weight = normal(5, 700, width), normal(5, 700, width), normal(width, dtype=torch.float32)
    weight, inputs = weight.requires_grad_(), [x.requires_grad_(), (0.5 * delta).requires_grad_()]
    fast = kernels.add_norm(*inputs, weight, 1e-5)
    total = inputs[0].float() + inputs[1].float()
    plain = (total, torch.nn.functional.rms_norm(total, (width,), weight, 1e-5))
    grads = [normal(5, 700, width) for _ in range(2)]
    for a, b in zip(fast, plain, strict=True):
        assert distance(a, b) < 2 * BF16  # the sum is rounded before it is normed
    found = torch.autograd.grad(fast, [*inputs, weight], grads)
    exact = torch.autograd.grad(plain, [*inputs, weight], [grad.float() for grad in grads])
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) < 2 * BF16


@pytest.mark.parametrize("rows_of_positions", [1, 3])
def test_split_rotary_rotates_queries_and_keys_but_not_values(rows_of_positions: int) -> None:
    from lakh.workloads.code.kernels import triton as kernels

    positions = torch.randint(0, 200, (rows_of_positions, 70), device="cuda")
    (rope,) = rotary_tables(SPEC, positions)
    x = normal(3, 70, 8 * 64).requires_grad_()
    fast = kernels.split_rotary(x, *rope, 4, 2)
    plain = split_rotary(x.float(), rope, 4, 2)
    for a, b in zip(fast, plain, strict=True):
        assert distance(a, b) < BF16
    grads = [normal(*part.shape) for part in fast]
    (a,) = torch.autograd.grad(fast, x, grads)
    (b,) = torch.autograd.grad(plain, x, [grad.float() for grad in grads])
    assert distance(a, b) < BF16


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [515, 32064, 65536])
def test_the_loss_and_its_gradient_equal_the_plain_form(vocab: int, smoothing: float) -> None:
    from lakh.workloads.code.kernels import triton as kernels

    logits = normal(40, vocab)
    targets = torch.randint(0, vocab, (40,), device="cuda")
    targets[7] = -100
    scale = torch.full((), 0.25, device="cuda")
    objective = Objective(z_loss=1e-3, label_smoothing=smoothing)
    loss, grad = _cross_entropy(logits.float(), targets, scale, objective)
    fast_loss, fast_grad = kernels.cross_entropy_(logits.clone(), targets, scale, objective)
    assert float(fast_loss) == pytest.approx(float(loss), rel=1e-5)
    assert distance(fast_grad, grad) < BF16
    assert not fast_grad[7].any()


def test_the_chunked_loss_is_that_of_whole_logits() -> None:
    x, weight = normal(1000, 256).requires_grad_(), normal(515, 256, dtype=torch.float32).requires_grad_()
    targets = torch.randint(0, 515, (1000,), device="cuda")
    fast = linear_cross_entropy(x, weight, targets, scale=1e-3, logit_bytes=1 << 17)
    plain = torch.nn.functional.cross_entropy((x @ weight.bfloat16().T).float(), targets)
    assert float(fast.detach()) == pytest.approx(float(plain.detach()), rel=1e-3)
    for a, b in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (fast, plain)), strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) < 3 * BF16  # the plain form rounds logits, gradient and product


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    q, k, v = (normal(2, 256, heads, 64) for heads in (4, 2, 2))
    starts = torch.tensor([0, 100, 256, 300, 512, 512, 512], dtype=torch.int32, device="cuda")
    packed = Documents(starts, 256)
    for documents in (None, packed):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        exact = [x.float().detach().requires_grad_() for x in (q, k, v)]
        fast, plain = KERNELS[name](*inputs, documents), KERNELS["torch"](*exact, documents)
        assert distance(fast, plain) < 3 * BF16
        grad = normal(2, 256, 4, 64)
        for a, b in zip(
            torch.autograd.grad(fast, inputs, grad), torch.autograd.grad(plain, exact, grad.float()), strict=True
        ):
            assert distance(a, b) < 5 * BF16


def accelerate(model: CodeModel, settings: Training | None = None) -> None:
    ops, mode, _ = choose_ops(model.spec, settings or Training(), bf16=True, device="cuda")
    model.set_ops(ops)
    model.compile_model(mode)


@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
def test_the_fast_model_has_the_loss_and_gradient_of_the_plain_one(recomputation: str) -> None:
    tokens = torch.randint(0, 515, (4, 257), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for fast in (False, True):
        model = CodeModel(replace(SPEC))
        init_weights(model, 1)
        model.cuda()
        if fast:
            model.dtype = torch.bfloat16
            accelerate(model, Training(recompute=recomputation))
        loss = model(tokens[:, :-1], targets_BT=tokens[:, 1:])
        loss.backward()
        results.append((float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (plain, plain_grad), (fast_loss, fast_grad) = results
    assert fast_loss == pytest.approx(plain, rel=1e-3)
    assert distance(fast_grad, plain_grad) < 0.03  # a few roundings to bf16 through two blocks


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("weight", [None, 1e-3])
def test_a_captured_pass_trains_like_a_plain_one(weight: float | None, micro_batch: int) -> None:
    """Steps of one and of two micro-batches with accumulated gradients, on two alternating batches."""
    results = []
    for records in (False, True):
        model = CodeModel(SPEC)
        init_weights(model, 1)
        model.cuda().bfloat16()
        accelerate(model)
        data, optim = Data(sequence=64, batch=4, micro_batch=2), Optimizer(lr=3e-3, warmup_steps=0)
        run = Run(name="r", model=SPEC, data=data, optim=optim)
        optimizer = build_optimizer(model, run.optim)
        graphed = GraphedPass(plain_pass(Objective())) if records else None
        losses = []
        for step in range(6):
            rows = torch.randint(0, 515, (4, 65), generator=torch.Generator().manual_seed(step % 2)).cuda()
            batches = [Batch(part[:, :-1], part[:, 1:], weight=weight) for part in rows.split(micro_batch)]
            lr = learning_rate(step, run.optim, run.train.steps)
            result = update(model, optimizer, batches, lr=lr, clip_norm=run.optim.clip_norm, run_pass=graphed)
            losses.append(float(result.loss))
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=5e-3)  # atomic sums of the embedding's gradient, in bf16
    for first, last in ((0, 4), (1, 5)):  # the same rows
        assert results[0][last] < 0.98 * results[0][first]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(64, 48), (700, 1040)])
def test_operands_are_rounded_to_8_bits_as_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from lakh.workloads.code.kernels.eight_bit import triton_tensorwise as kernels

    x = normal(*shape)
    found = kernels.largest(x)
    assert found == x.float().abs().max()
    rounded, transposed, scale = kernels.round_both(x, found, dtype)
    factor = torch.finfo(dtype).max / found
    assert float(scale) == pytest.approx(1 / float(factor), rel=1e-6)
    assert torch.equal(transposed.float(), rounded.float().mT)
    assert distance(rounded.float(), (x.float() * factor).to(dtype).float()) < 1e-3  # a division may round otherwise
    assert distance(rounded.float() * scale, x) < 0.1


def test_an_8_bit_feed_forward_is_near_the_plain_one() -> None:
    from lakh.workloads.code.kernels.eight_bit.tensorwise import fp8_feed_forward, fp8_linear

    x, gate_up, down, grad = normal(2, 64, 256), normal(704, 256), normal(256, 352), normal(2, 64, 256)
    inputs = [(value * value.shape[-1] ** -0.5).detach().requires_grad_() for value in (x, gate_up, down)]
    fused = fp8_feed_forward(*inputs)
    apart = fp8_linear(swiglu(fp8_linear(inputs[0], inputs[1])), inputs[2])
    plain = swiglu(inputs[0] @ inputs[1].mT) @ inputs[2].mT
    assert distance(fused, apart) < 0.03
    for result in (fused, apart):
        assert distance(result, plain) < 0.1
        for a, b in zip(
            *(torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (result, plain)), strict=True
        ):
            assert distance(a, b) < 0.15


@pytest.mark.parametrize("width", [1000, 2048])
def test_the_backward_pass_of_a_norm_measures_its_result_or_leaves_out_the_weight(width: int) -> None:
    from lakh.workloads.code.kernels import triton as kernels

    grads, total = [normal(1300, width) for _ in range(2)], normal(1300, width)
    weight = normal(width, dtype=torch.float32)
    grad_x, grad_weight = kernels.add_norm_backward(*grads, total, weight, 1e-5)
    measured = kernels.measured_add_norm_backward(*grads, total, weight, 1e-5)
    assert all(map(torch.equal, measured, (grad_x, grad_weight, grad_x.float().abs().amax(1))))
    assert torch.equal(kernels.add_norm_backward_frozen(*grads, total, weight, 1e-5), grad_x)


def test_blocks_are_rounded_to_8_bits_by_scales_of_their_own() -> None:
    from lakh.workloads.code.kernels.eight_bit.triton_blockwise import round_blocks

    x = normal(256, 640)
    x[:128] *= 1000
    y, y_t, y_scale, y_t_scale = round_blocks(x, torch.float8_e4m3fn)
    for rounded, scale, exact in ((y, y_scale, x), (y_t, y_t_scale, x.mT)):
        found = (rounded.float() * scale.repeat_interleave(128, 1)).unflatten(1, (-1, 128))
        plain = exact.float().unflatten(1, (-1, 128))
        assert ((found - plain).norm(dim=2) / plain.norm(dim=2)).max() < 0.04


@pytest.mark.parametrize("recipe", ["rowwise", "int8_forward", "blockwise"])
def test_scaled_products_are_near_the_plain_ones(recipe: str) -> None:
    from lakh.workloads.code.acceleration import FP8_PRODUCTS

    linear, feed_forward = FP8_PRODUCTS[recipe]
    x, gate_up, down, grad = normal(2, 128, 256), normal(1280, 256), normal(256, 640), normal(2, 128, 256)
    inputs = [(value * value.shape[-1] ** -0.5).detach().requires_grad_() for value in (x, gate_up, down)]
    plain = swiglu(inputs[0] @ inputs[1].mT) @ inputs[2].mT
    results = [linear(swiglu(linear(inputs[0], inputs[1])), inputs[2])]
    results += [feed_forward(*inputs)] if feed_forward else []
    for result in results:
        assert distance(result, plain) < 0.1
        for a, b in zip(
            *(torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (result, plain)), strict=True
        ):
            assert distance(a, b) < 0.15


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "int8_forward", "blockwise"])
def test_a_model_trains_with_8_bit_products_and_bf16_ends(recipe: str) -> None:
    spec = Model(layers=3, width=256, heads=4, kv_heads=2, ffn=384, vocab=515, context=256, tied=False)
    ends = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    tokens = torch.randint(0, 515, (4, 257), generator=torch.Generator().manual_seed(0)).cuda()
    grads = []
    for settings in (Training(), Training(fp8=True, fp8_recipe=recipe, **ends)):  # type: ignore[arg-type]
        model = CodeModel(spec)
        init_weights(model, 1)
        model.cuda()
        model.dtype = torch.bfloat16
        accelerate(model, settings)
        is_plain = [block.ops.linear is torch.nn.functional.linear for block in model.each_block()]
        assert is_plain == ([True, False, True] if settings.fp8 else [True] * 3)
        model(tokens[:, :-1], targets_BT=tokens[:, 1:]).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 0.001 < distance(grads[1], grads[0]) < 0.15
