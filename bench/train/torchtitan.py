"""torchtitan's Llama or mixture of experts of a shape, from a checkout: its model and its loss, compiled as its trainer
compiles them.

    git clone --branch v0.2.2 https://github.com/pytorch/torchtitan
    lakh bench train --shapes 1.2b-4k,moe-4b --peers torchtitan --torchtitan torchtitan

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

__all__ = ["TESTED_VERSION", "TorchtitanModel", "import_checkout"]

TESTED_VERSION = "v0.2.2"
PACKAGES = (
    "", ".components", ".config", ".models", ".models.llama3", ".models.llama3.model", ".models.qwen3",
    ".models.qwen3.model", ".protocols", ".tools",
)  # fmt: skip


def import_checkout(checkout: str) -> None:
    """Make the modules of a checkout importable, without those of its trainer."""
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
    # The specification of a training run; the models take only these names from it.
    protocol = importlib.import_module("torchtitan.protocols.model")
    train_spec = ModuleType("torchtitan.protocols.train_spec")
    train_spec.ModelProtocol = protocol.ModelProtocol  # type: ignore[attr-defined]
    train_spec.BaseModelArgs = protocol.BaseModelArgs  # type: ignore[attr-defined]
    sys.modules.setdefault(train_spec.__name__, train_spec)


class TorchtitanModel(nn.Module):
    """The model of a checkout with the call signature of lakh's."""

    def __init__(self, spec: Model, sequence: int, device: torch.device, checkout: str, *, compiled: bool) -> None:
        super().__init__()
        import_checkout(checkout)
        make = _llama if spec.experts is None else _mixture
        with device, torch.no_grad():
            model = make(spec, sequence)
            model.init_weights(buffer_device=device)
        if compiled and spec.experts is None:
            for name, block in model.layers.named_children():
                model.layers.register_module(name, torch.compile(block, fullgraph=True))
        elif compiled:
            _compile_mixture(model)
        self.inner = model
        loss = importlib.import_module("torchtitan.components.loss").cross_entropy_loss
        self._loss = torch.compile(loss) if compiled else loss

    def forward(self, inputs: Tensor, positions: Tensor | None, *, targets_BT: Tensor, **_: object) -> Tensor:
        total: Tensor = self._loss(self.inner(inputs), targets_BT)
        return total / targets_BT.numel()


def _llama(spec: Model, sequence: int) -> Any:
    module = importlib.import_module("torchtitan.models.llama3.model.model")
    args = module.TransformerModelArgs(
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
    return module.Transformer(args)


def _mixture(spec: Model, sequence: int) -> Any:
    """Its Qwen3, whose query and key norms are a setting, with its token-choice experts."""
    assert spec.experts is not None
    module = importlib.import_module("torchtitan.models.qwen3.model.model")
    experts = importlib.import_module("torchtitan.models.moe").MoEArgs(
        num_experts=spec.experts.count,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=spec.experts.normalize,
        score_before_experts=False,
        top_k=spec.experts.top_k,
        load_balance_coeff=None,
    )
    args = module.Qwen3ModelArgs(
        dim=spec.width,
        n_layers=spec.layers,
        n_heads=spec.heads,
        n_kv_heads=spec.kv_heads,
        vocab_size=spec.vocab,
        head_dim=spec.head_dim,
        hidden_dim=spec.ffn,
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_base,
        qk_norm=spec.qk_norm,
        max_seq_len=sequence,
        moe_enabled=True,
        moe_inter_dim=spec.experts.ffn,
        moe_args=experts,
    )
    return module.Qwen3Model(args)


def _compile_mixture(model: Any) -> None:
    """As its apply_compile does for a mixture of experts: every part of a block by itself, and the grouped products,
    but not the dispatch of tokens."""
    torch._dynamo.config.capture_scalar_outputs = True
    moe: Any = importlib.import_module("torchtitan.models.moe.moe")
    for block in model.layers.values():
        for name, part in list(block.named_children()):
            if not isinstance(part, moe.MoE):
                setattr(block, name, torch.compile(part, fullgraph=True))
                continue
            for inner_name, inner in list(part.named_children()):
                if inner_name != "experts":
                    setattr(part, inner_name, torch.compile(inner, fullgraph=True))
    moe._run_experts_grouped_mm = torch.compile(moe._run_experts_grouped_mm, fullgraph=True)
