"""Muon: momentum, orthogonalised, for the matrices of the blocks (Keller Jordan, 2024).

Matrices of equal shape are worked on together, as one batch of products: a model of a hundred million parameters has
84 of them, and one by one they would keep a GPU waiting for its next small product.

Where FSDP has cut matrices up, each rank gets some of them whole, orthogonalises those, and sends every rank its part
back: the arithmetic is shared out instead of repeated, and a rank sends about twice what it holds. Matrices that tensor
parallelism has cut up as well are gathered on every rank. Nothing changes where `found_inf` is 1, and the device is
not asked what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lakh.spec import Optimizer

__all__ = ["Muon", "orthogonalise"]

BUNCH_ELEMENTS = 1 << 26  # of one batch: 256 MiB in float32, a few times that while it is worked on
ROOT_MEAN_SQUARE = 0.2  # of an update, as of AdamW's (arXiv 2502.16982): both share one learning rate and decay


class Muon(torch.optim.Optimizer):
    """The other parameters are left to the AdamW it is given."""

    found_inf: Tensor | None = None

    def __init__(self, matrices: Sequence[nn.Parameter], others: torch.optim.AdamW, settings: Optimizer) -> None:
        super().__init__(list(matrices), {"lr": settings.lr, "weight_decay": settings.weight_decay})
        self._others, self._momentum = others, settings.momentum
        for parameter in matrices:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
        self._own = list(self.param_groups)
        self.param_groups.extend(others.param_groups)
        self.state.update(others.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._others.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._others.step()
        for group in self._own:
            for bunch in _bunches([p for p in group["params"] if p.grad is not None]):
                self._turn(bunch, group["lr"], group["weight_decay"])

    def _turn(self, bunch: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        momenta = [_held(self.state[parameter]["momentum"]) for parameter in bunch]
        grad = torch.stack([_held(parameter.grad) for parameter in bunch])
        momentum = torch.stack(momenta)
        share: float | Tensor = 1.0
        if self.found_inf is not None:  # so that nothing changes, even if the gradient is not finite
            grad.masked_fill_(self.found_inf.bool(), 0.0)
            share = (1 - self.found_inf).to(grad.dtype)
        momentum.lerp_(grad, (1 - self._momentum) * share)
        torch._foreach_copy_(momenta, list(momentum.unbind()))
        ahead = momentum.lerp_(grad, 1 - self._momentum)
        update = _orthogonalise_held(ahead, bunch[0])
        size = ROOT_MEAN_SQUARE * max(bunch[0].shape) ** 0.5
        update = update * (share * (-lr * size))
        held = [_held(parameter) for parameter in bunch]
        torch._foreach_mul_(held, 1 - lr * weight_decay * share)
        torch._foreach_add_(held, list(update.to(held[0].dtype).unbind()))


def _held(tensor: Tensor | None) -> Tensor:
    """What this rank holds of a tensor."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _bunches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of equal shape and cut, in their order, as many as are worked on at once: the same on all ranks."""
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        cut = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
        alike.setdefault((parameter.shape, *cut), []).append(parameter)
    for those in alike.values():
        parts = those[0].device_mesh.size() if isinstance(those[0], DTensor) else 1
        most = max(1, BUNCH_ELEMENTS * parts // those[0].numel())
        for first in range(0, len(those), most):
            yield those[first : first + most]


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of the singular value decomposition of a matrix, or of each matrix of a batch: a quintic
    Newton-Schulz iteration.

    The coefficients push small singular values up fast and leave all of them near 1 (within 0.3), which is enough
    (Keller Jordan, "Muon", 2024). In bf16 on a GPU, where matrix products are the cost; in float32 on a CPU.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    x = x if x.dim() == 3 else x[None]
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrix.dtype).reshape(matrix.shape)


def _orthogonalise_held(held: Tensor, like: Tensor) -> Tensor:
    """This rank's parts of the orthogonalised matrices of which it holds these parts; `like` tells how they are cut."""
    if not isinstance(like, DTensor):
        return orthogonalise(held)
    cuts = [
        (axis, placement)
        for axis, placement in enumerate(like.placements)
        if not placement.is_replicate() and like.device_mesh.size(axis) > 1
    ]
    if not cuts:
        return orthogonalise(held)
    axis, placement = cuts[0]
    if len(cuts) == 1 and type(placement) is Shard and placement.dim == 0:
        return _share_out(held, like.shape[0], like.device_mesh.get_group(axis))
    whole = [
        DTensor.from_local(
            part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False
        ).full_tensor()
        for part in held.unbind()
    ]
    turned = orthogonalise(torch.stack(whole))
    cut = (distribute_tensor(m, like.device_mesh, like.placements, src_data_rank=None) for m in turned.unbind())
    return torch.stack([matrix.to_local() for matrix in cut])


def _share_out(held: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Orthogonalise matrices of which each rank of the group holds some rows; matrix i is the work of rank i mod n."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    count, _, columns = held.shape
    chunk = -(-rows // ranks)
    rows_of = [max(0, min(rows, (rank + 1) * chunk) - rank * chunk) for rank in range(ranks)]
    owned = [list(range(owner, count, ranks)) for owner in range(ranks)]
    sends = [len(those) * rows_of[me] * columns for those in owned]
    receives = [len(owned[me]) * there * columns for there in rows_of]
    order = [place for those in owned for place in those]
    arrived = _all_to_all(held[order].flatten(), sends, receives, group)
    if owned[me]:
        parts = [part.view(-1, there, columns) for part, there in zip(arrived.split(receives), rows_of, strict=True)]
        turned = orthogonalise(torch.cat(parts, dim=1))
        arrived = torch.cat([part.flatten() for part in turned.split(rows_of, dim=1)])
    back = _all_to_all(arrived, receives, sends, group)
    result = torch.empty_like(held)
    result[order] = back.view(count, rows_of[me], columns)
    return result


def _all_to_all(values: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    result = values.new_empty(sum(receives))
    dist.all_to_all_single(result, values.contiguous(), receives, sends, group=group)
    return result
