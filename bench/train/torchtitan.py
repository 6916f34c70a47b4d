"""torchtitan's Llama of a shape, from a checkout: its model, its compile of each block, and its compiled loss.

    git clone --branch v0.2.2 https://github.com/pytorch/torchtitan
    lakh bench train --shapes 1.2b-4k --peers torchtitan --torchtitan torchtitan

Only the model's files are imported. The packages' own __init__ modules also import the trainer with its data sets and
command line, whose dependencies a machine for benchmarks need not have.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec import Model

__all__ = ["TESTED_VERSION", "TorchtitanModel", "import_model"]

TESTED_VERSION = "v0.2.2"
PACKAGES = ("", ".components", ".config", ".models", ".models.llama3", ".models.llama3.model", ".protocols", ".tools")


def import_model(checkout: str) -> tuple[type[Any], type[nn.Module], Any]:
    """(TransformerModelArgs, Transformer, cross_entropy_loss) of a checkout."""
    root = Path(checkout) / "torchtitan"
    if not (root / "models" / "llama3" / "model" / "model.py").exists():
        found = "holds no torchtitan/models/llama3/model/model.py"
        raise UserError(f"--torchtitan {checkout}", found, f"name a checkout of torchtitan {TESTED_VERSION}")
    for name in PACKAGES:
        package = ModuleType(f"torchtitan{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules.setdefault(package.__name__, package)
    settings = importlib.import_module("torchtitan.config.job_config")
    vars(sys.modules["torchtitan.config"]).update(vars(settings))
    # The specification of a training run; the model takes only this name from it.
    protocol = importlib.import_module("torchtitan.protocols.model").ModelProtocol
    train_spec = ModuleType("torchtitan.protocols.train_spec")
    train_spec.ModelProtocol = protocol  # type: ignore[attr-defined]
    sys.modules.setdefault(train_spec.__name__, train_spec)
    model = importlib.import_module("torchtitan.models.llama3.model.model")
    loss = importlib.import_module("torchtitan.components.loss")
    return model.TransformerModelArgs, model.Transformer, loss.cross_entropy_loss


class TorchtitanModel(nn.Module):
    """The model of a checkout with the call signature of lakh's."""

    def __init__(self, spec: Model, sequence: int, device: torch.device, checkout: str, *, compiled: bool) -> None:
        super().__init__()
        make_args, make_model, loss = import_model(checkout)
        args = make_args(
            dim=spec.width,
            n_layers=spec.layers,
            n_heads=spec.heads,
            n_kv_heads=spec.kv_heads,
            vocab_size=spec.vocab,
            multiple_of=spec.ffn,  # its feed-forward size is rounded up to a multiple: exactly spec.ffn
            ffn_dim_multiplier=1e-3,
            rope_theta=spec.rope_base,
            max_seq_len=sequence,
        )
        with device, torch.no_grad():
            model: Any = make_model(args)
            model.init_weights(buffer_device=device)
        if compiled:
            for name, block in model.layers.named_children():
                model.layers.register_module(name, torch.compile(block, fullgraph=True))
        self.inner = model
        self._loss = torch.compile(loss) if compiled else loss

    def forward(self, inputs: Tensor, positions: Tensor | None, *, targets_BT: Tensor, **_: object) -> Tensor:
        total: Tensor = self._loss(self.inner(inputs), targets_BT)
        return total / targets_BT.numel()
