"""Products by the algorithm that was measured as fastest: when they are, which one it is, and that they are right."""

import pytest
import torch
import torch.nn.functional as F

from lakh.spec import Model
from lakh.workloads.code.acceleration import speed_up
from lakh.workloads.code.cublaslt import Form, form_of
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.products import LONG_RUN_FLOPS, SHORTEST_FLOPS, choose_products, fastest, linear, product

LONG = {"device": "cuda", "bf16": True, "recomputation": "none"}
LONG |= {"shortest_flops": SHORTEST_FLOPS, "run_flops": LONG_RUN_FLOPS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wanted": "library"}, "asked for"),
        ({"device": "cpu"}, "nothing to choose from on cpu"),
        ({"bf16": False}, "only products in bf16"),
        ({"recomputation": "selective"}, "train.recompute = selective"),
        ({"shortest_flops": 1e9}, "1.0 GFLOP of a block's shortest"),
        ({"run_flops": 1e16}, "too short a run"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_gain_is_left_to_the_library(change: dict, words: str) -> None:
    measured, reason = choose_products(**{"wanted": "auto", **LONG, **change})
    assert not measured
    assert words in reason


def test_long_products_on_a_gpu_are_measured() -> None:
    assert choose_products("auto", **LONG)[0]


def test_the_librarys_own_choice_stays_unless_another_is_clearly_faster() -> None:
    assert fastest(1.0, [1.1, 0.9, 0.95]) == 1
    assert fastest(1.0, [0.997, 1.2]) is None
    assert fastest(1.0, []) is None


def test_a_form_says_which_operands_are_transposes() -> None:
    a, b = torch.empty(6, 4), torch.empty(4, 8)
    assert form_of(a, b) == Form(6, 8, 4, False, False)
    assert form_of(a.t().contiguous().t(), b) == Form(6, 8, 4, True, False)
    assert form_of(a, torch.empty(8, 4).t()) == Form(6, 8, 4, False, True)
    assert form_of(torch.empty(6, 8)[:, :4], b) is None
    assert form_of(a, torch.empty(8, 8).t()[::2]) is None


def test_it_is_the_linear_product_with_both_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 5), (4, 5), (2, 3, 4)))
    found = []
    for multiply in (F.linear, linear):
        mine = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        y = multiply(*mine)
        y.backward(grad)
        found.append((y.detach(), *(tensor.grad for tensor in mine)))
    for theirs, ours in zip(*found, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs)
    torch.library.opcheck(product, (x[0], weight.t()))


def test_a_model_on_a_cpu_keeps_its_products_and_says_so() -> None:
    model = CodeModel(Model(layers=1, width=16, heads=2, kv_heads=1, ffn=16, vocab=32, context=16))
    choices = {choice.what: choice for choice in speed_up(model, device="cpu", tokens=1 << 20)}
    assert choices["products"].choice == "the library's own"
    assert next(model.each_block()).ffn.product is F.linear
