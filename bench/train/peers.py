"""The models of transformers and of PEFT in a shape, with the call signature of lakh's model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakh.spec import Adapter, Model
from lakh.workloads.code.formats.hf.config import config_of

__all__ = ["TransformersModel", "next_token_loss"]


class TransformersModel(nn.Module):
    """The same family and shape, from the config.json that lakh would export; with adapters, PEFT's on every matrix of
    the blocks."""

    def __init__(self, spec: Model, device: torch.device, adapter: Adapter | None = None) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = config_of(spec, torch.float32, {})
        config = AutoConfig.for_model(**fields, attn_implementation="sdpa")
        with device:
            model: Any = AutoModelForCausalLM.from_config(config)
        if adapter is not None:
            from peft import LoraConfig, get_peft_model

            settings = LoraConfig(r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules="all-linear")
            # Adapters in the type of the base, which is faster than PEFT's default of float32.
            model = get_peft_model(model, settings, autocast_adapter_dtype=False)
        self.inner = model

    def forward(self, inputs: Tensor, positions: Tensor | None, *, targets_BT: Tensor, **_: object) -> Tensor:
        return next_token_loss(self.inner(input_ids=inputs, use_cache=False).logits, targets_BT)


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Computed in float32 for logits of any type: the sum over a vocabulary needs it."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
