"""Build the optimizer, and name its state for checkpoints.

AdamW for everything, or Muon (muon.py) for the matrices of the blocks and AdamW for embedding, head and norms. Both
skip the update if the tensor `optimizer.found_inf` is 1, without a device synchronisation. The state exists from the
start, so that a fresh run and a resumed one have the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lakh.checkpoint.incremental import TensorRole
from lakh.spec import Optimizer
from lakh.trainer.optim.muon import Muon
from lakh.trainer.optim.sharded_adamw import ShardedAdamW

__all__ = ["build_optimizer", "named_state", "role_of"]


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a model, with weight decay on matrices only."""
    named = _trained(model)
    if settings.kind == "muon":
        matrices = [p for name, p in named if p.dim() == 2 and "blocks." in name]
        by_muon = {id(p) for p in matrices}
        return Muon(matrices, _adamw([p for _, p in named if id(p) not in by_muon], settings), settings)
    return _adamw([p for _, p in named], settings)


def _adamw(parameters: Sequence[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    decayed = [p for p in parameters if p.dim() >= 2]
    plain = [p for p in parameters if p.dim() < 2]
    kind = ShardedAdamW if any(isinstance(p, DTensor) for p in parameters) else torch.optim.AdamW
    optimizer = kind(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters, except those that fine-tuning with adapters leaves as they are."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the training state by name: model.* and optim.*; without frozen weights."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(model):
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors


def role_of(name: str) -> TensorRole:
    """What a tensor of `named_state` is to the optimizer."""
    if name.startswith("model."):
        return "weight"
    roles: dict[str, TensorRole] = {
        "exp_avg": "first_moment",
        "momentum": "first_moment",
        "exp_avg_sq": "second_moment",
    }
    return roles.get(name.rpartition(".")[2], "other")
