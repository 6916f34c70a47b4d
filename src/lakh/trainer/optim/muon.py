"""Muon: orthogonalised momentum for the matrices of the blocks (Keller Jordan, 2024).

Matrices of equal shape are processed as one batch: a model of a hundred million parameters has 84 of them, and one at a
time would leave a GPU idle between small products.

With FSDP each rank gathers some of the matrices, orthogonalises them and sends every rank its shard, so that the work
is divided instead of repeated; a rank sends about twice its shard. Matrices that are also tensor-parallel are gathered
on every rank. Nothing changes if `found_inf` is 1, without a device synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lakh.spec import Optimizer
from lakh.trainer.optim.sharded_adamw import local_part

__all__ = ["Muon", "orthogonalise"]

BATCH_ELEMENTS = 1 << 26  # of one batch: 256 MiB in float32, and a few times that during the update
ROOT_MEAN_SQUARE = 0.2  # of an update, like AdamW's (arXiv 2502.16982), so that both share learning rate and decay


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`, and the given AdamW for all other parameters."""

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
            for batch in _batches([p for p in group["params"] if p.grad is not None]):
                self._update_batch(batch, group["lr"], group["weight_decay"])

    def _update_batch(self, batch: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        momenta = [local_part(self.state[parameter]["momentum"]) for parameter in batch]
        grad = torch.stack([local_part(parameter.grad) for parameter in batch])
        momentum = torch.stack(momenta)
        share: float | Tensor = 1.0
        if self.found_inf is not None:  # nothing may change, even if the gradient is not finite
            grad.masked_fill_(self.found_inf.bool(), 0.0)
            share = (1 - self.found_inf).to(grad.dtype)
        momentum.lerp_(grad, (1 - self._momentum) * share)
        torch._foreach_copy_(momenta, list(momentum.unbind()))
        ahead = momentum.lerp_(grad, 1 - self._momentum)
        update = _orthogonalise_local(ahead, batch[0])
        size = ROOT_MEAN_SQUARE * max(batch[0].shape) ** 0.5
        update = update * (share * (-lr * size))
        local = [local_part(parameter) for parameter in batch]
        torch._foreach_mul_(local, 1 - lr * weight_decay * share)
        torch._foreach_add_(local, list(update.to(local[0].dtype).unbind()))


def _batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of equal shape and placement, in batches that are the same on all ranks."""
    by_shape: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        placement = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
        by_shape.setdefault((parameter.shape, *placement), []).append(parameter)
    for same in by_shape.values():
        parts = same[0].device_mesh.size() if isinstance(same[0], DTensor) else 1
        most = max(1, BATCH_ELEMENTS * parts // same[0].numel())
        for first in range(0, len(same), most):
            yield same[first : first + most]


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


def _orthogonalise_local(local: Tensor, like: Tensor) -> Tensor:
    """The local parts of the orthogonalised matrices; `like` gives their placement."""
    if not isinstance(like, DTensor):
        return orthogonalise(local)
    sharded = [
        (axis, placement)
        for axis, placement in enumerate(like.placements)
        if not placement.is_replicate() and like.device_mesh.size(axis) > 1
    ]
    if not sharded:
        return orthogonalise(local)
    axis, placement = sharded[0]
    if len(sharded) == 1 and type(placement) is Shard and placement.dim == 0:
        return _orthogonalise_distributed(local, like.shape[0], like.device_mesh.get_group(axis))
    whole = [
        DTensor.from_local(
            part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False
        ).full_tensor()
        for part in local.unbind()
    ]
    orthogonal = orthogonalise(torch.stack(whole))
    resharded = (
        distribute_tensor(m, like.device_mesh, like.placements, src_data_rank=None) for m in orthogonal.unbind()
    )
    return torch.stack([matrix.to_local() for matrix in resharded])


def _orthogonalise_distributed(local: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Orthogonalise matrices of which each rank of the group holds some rows; rank i mod n works on matrix i."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    count, _, columns = local.shape
    chunk = -(-rows // ranks)
    rows_of = [max(0, min(rows, (rank + 1) * chunk) - rank * chunk) for rank in range(ranks)]
    owned = [list(range(owner, count, ranks)) for owner in range(ranks)]
    sends = [len(same) * rows_of[me] * columns for same in owned]
    receives = [len(owned[me]) * num_rows * columns for num_rows in rows_of]
    order = [place for same in owned for place in same]
    arrived = _all_to_all(local[order].flatten(), sends, receives, group)
    if owned[me]:
        parts = [
            part.view(len(owned[me]), num_rows, columns)
            for part, num_rows in zip(arrived.split(receives), rows_of, strict=True)
        ]
        orthogonal = orthogonalise(torch.cat(parts, dim=1))
        arrived = torch.cat([part.flatten() for part in orthogonal.split(rows_of, dim=1)])
    back = _all_to_all(arrived, receives, sends, group)
    result = torch.empty_like(local)
    result[order] = back.view(count, rows_of[me], columns)
    return result


def _all_to_all(values: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    result = values.new_empty(sum(receives))
    dist.all_to_all_single(result, values.contiguous(), receives, sends, group=group)
    return result
