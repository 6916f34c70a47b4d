"""Granite: a Llama block with factors of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights
from lakh.workloads.code.architectures.llama import LLAMA, attention, feed_forward
from lakh.workloads.code.ops import ModelOps, Rope, rms_norm

__all__ = ["GRANITE"]


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    scale = spec.residual_scale or 1.0
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context) * scale
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, feed_forward(weights, ops, h) * scale


GRANITE = replace(
    LLAMA,
    name="granite",
    hf_model_type="granite",
    hf_class="GraniteForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    hf_names={
        "embedding_scale": "embedding_multiplier",
        "score_scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_divisor": "logits_scaling",
    },
    hf_defaults={
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    gguf="granite",
    gguf_names={
        "embedding_scale": "embedding_scale",
        "score_scale": "attention.scale",
        "residual_scale": "residual_scale",
        "logit_divisor": "logit_scale",
    },
    block=_block,
    fuses_norms=False,
    # The head is linear: dividing its input divides the logits.
    final_norm=lambda spec, vector, x: rms_norm(x, vector("norm"), spec.norm_eps) / (spec.logit_divisor or 1.0),
    embedding_scale=lambda spec: spec.embedding_scale or 1.0,
)
