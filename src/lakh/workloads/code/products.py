"""x @ weight.T of long matrices, forward and backward, by the algorithm of the library that was measured as fastest.

The library (cuBLAS) chooses by a heuristic. The first product of each form, in the first step, is computed by all of
its algorithms a few times in turn; the quickest two then run against the library's own choice for a tenth of a second
each, twice. Only that counts: a GPU at its power limit lowers its clock, and the algorithm that is quickest at a given
clock may draw so much that it is slower in the long run. On an H200, 1.245 billion parameters, 17 x 4,096 tokens
(2026-11-15, in turns in one process): 56.3 % MFU with the library's choice, 56.3 % with what is quickest at a given
clock, 56.7 % with what lasts. An algorithm whose result differs is left alone.

Same products, in float32 sums whose order differs. Cost: some 0.8 s for each of a block's 12 forms, once; nothing
is measured while a CUDA graph is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lakh.workloads.code.cublaslt import Algorithm, Form, form_of, library

__all__ = ["choose_products", "fastest", "linear", "product"]

WORTH = 1.005
"""By less than this the library's own choice stays."""
ROUNDS = 5
CONTENDERS = 2
"""That run against the library's choice; on an H200 what lasted was the quickest of all in every case."""
BURST_S = 0.12
"""Long enough for the clock to follow what an algorithm draws."""
LONG_RUN_FLOPS = 8e17
"""Of a rank: half an hour at some 400 TFLOP/s, in which half a percent is more than what measuring costs."""
SHORTEST_FLOPS = 5e10
"""Of a product: shorter ones end before Python has asked for the next (some 80 us on an H200)."""
SAMPLE_ROWS = 256

_chosen: dict[tuple[int, Form], Algorithm | None] = {}
"""What was measured in this process, by GPU and form; None is torch's own choice."""


def choose_products(
    wanted: str, *, device: str, bf16: bool, recomputation: str, shortest_flops: float, run_flops: float
) -> tuple[bool, str]:
    """Whether products are chosen by measurement ("auto") or by the library ("library"), and why."""
    if wanted == "library":
        return False, "asked for"
    if device != "cuda":
        return False, f"there is nothing to choose from on {device}"
    if not bf16:
        return False, "only products in bf16 are chosen by measurement"
    if recomputation != "none":
        return False, f"train.recompute = {recomputation} tells the library's products apart by their names"
    if shortest_flops < SHORTEST_FLOPS:
        return False, f"{shortest_flops / 1e9:.1f} GFLOP of a block's shortest end before Python asks for the next"
    if run_flops < LONG_RUN_FLOPS:
        return False, f"{run_flops:.1e} FLOPs of a rank are too short a run to win back the seconds of measuring"
    return True, "measured in the first step: the fastest of the library's algorithms for each form"


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x of any number of dims."""
    return _Linear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        return product(x_NK, weight_MK.t())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad_NM,) = grad_outputs
        grad_NM = grad_NM.contiguous()
        x_NK, weight_MK = ctx.saved_tensors
        return product(grad_NM, weight_MK), product(grad_NM.t(), x_NK)


@torch.library.custom_op("lakh::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two matrices; a custom operator, because it decides when it is called."""
    out = a.new_empty(a.shape[0], b.shape[1])
    form = form_of(a, b) if a.device.type == "cuda" and a.dtype == b.dtype == torch.bfloat16 else None
    if form is None or form.flops < SHORTEST_FLOPS:
        return torch.mm(a, b, out=out)
    key = (a.device.index or 0, form)
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return torch.mm(a, b, out=out)
        _chosen[key] = _measure(form, a, b, out)
    algorithm = _chosen[key]
    if algorithm is None:
        return torch.mm(a, b, out=out)
    found = library(key[0])
    assert found is not None
    found.run(algorithm, a, b, out)
    return out


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def fastest(own_ms: float, others_ms: Sequence[float]) -> int | None:
    """Which of the others is worth taking; None for the library's own."""
    best = min(range(len(others_ms)), key=others_ms.__getitem__, default=None)
    return best if best is not None and WORTH * others_ms[best] <= own_ms else None


def _measure(form: Form, a: Tensor, b: Tensor, out: Tensor) -> Algorithm | None:
    """The algorithm for these operands that is fastest in the long run; None where the library's own choice is."""
    try:
        found = library(a.device.index or 0)
        listed = found.algorithms(form) if found is not None else []
    except RuntimeError:  # a library that knows other calls than ours: torch's own products are as good as before
        return None
    if found is None or not listed:
        return None

    def of(algorithm: Algorithm) -> Callable[[], object]:
        return lambda: found.run(algorithm, a, b, out)

    def own() -> object:
        return torch.mm(a, b, out=out)

    own()
    right = _sample(out)
    algorithms = [one for one in listed if _is_right(of(one), out, right)]
    own_ms, *others_ms = _in_turn_ms([own, *map(of, algorithms)], rounds=ROUNDS, repeats=1)
    quickest = sorted(range(len(algorithms)), key=others_ms.__getitem__)[:CONTENDERS]
    repeats = max(1, round(1e3 * BURST_S / own_ms))
    own_ms, *others_ms = _in_turn_ms([own, *(of(algorithms[i]) for i in quickest)], rounds=2, repeats=repeats)
    best = fastest(own_ms, others_ms)
    return None if best is None else algorithms[quickest[best]]


def _in_turn_ms(runs: Sequence[Callable[[], object]], *, rounds: int, repeats: int) -> list[float]:
    """The time of one run of each, the shortest of some rounds of all of them in turn."""
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, mine in zip(runs, marks, strict=True):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            for _ in range(repeats):
                run()
            ended.record()
            mine.append((began, ended))
    torch.cuda.synchronize()
    return [min(began.elapsed_time(ended) for began, ended in mine) / repeats for mine in marks]


def _is_right(run: Callable[[], object], out: Tensor, right: Tensor) -> bool:
    out.fill_(float("nan"))
    try:
        run()
    except RuntimeError:  # an algorithm that this form turns out not to have
        return False
    # Of bf16: results that were rounded once, from float32 sums in another order.
    return bool((_sample(out) - right).abs().max() <= 0.02 * right.abs().max())


def _sample(out: Tensor) -> Tensor:
    return torch.cat((out[:SAMPLE_ROWS], out[-SAMPLE_ROWS:])).float()
