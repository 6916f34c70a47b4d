"""AdamW for sharded parameters: the fused update of torch, on the part of each tensor that this rank holds.

The update is element by element, so that a rank needs nothing from others. torch's own step passes whole lists of
DTensors to one operation and derives their sharding, which takes longer than the update itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["ShardedAdamW", "local_part"]


class ShardedAdamW(torch.optim.AdamW):
    """The same bits as torch.optim.AdamW(fused=True), also with parameters of several meshes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            steps = [self.state[parameter]["step"] for parameter in parameters]
            if steps:
                torch._foreach_add_(steps, 1)
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in parameters:
                if local_part(parameter).numel():  # a rank may hold no row of a small tensor
                    by_dtype.setdefault(parameter.dtype, []).append(parameter)
            for same in by_dtype.values():
                self._update(same, group, found_inf)
            if found_inf is not None and steps:
                torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], found_inf: Tensor | None) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [local_part(parameter) for parameter in parameters],
            [_local_gradient(parameter) for parameter in parameters],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )


def local_part(tensor: Tensor | None) -> Tensor:
    """What this rank holds of a tensor; it shares its memory."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local_part(grad)
