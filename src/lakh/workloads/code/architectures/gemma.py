"""Gemma and CodeGemma: a Llama block with a GELU gate. Norms are stored as their difference from 1, and embeddings are
scaled by sqrt(width).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.architectures.llama import attention, llama_parameters
from lakh.workloads.code.ops import ModelOps, Rope, rms_norm

__all__ = ["GEMMA", "gelu_feed_forward", "norm_weight"]


def norm_weight(weights: LayerWeights, name: str) -> Tensor:
    """What a norm multiplies with."""
    return 1 + weights.vector(name).float()


def gelu_feed_forward(weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    """GeGLU, with the approximation of GELU by tanh."""
    gate, up = ops.linear(ops.enter(h), weights.matrix("gate_up", h.dtype)).chunk(2, dim=-1)
    return ops.leave(ops.linear(F.gelu(gate, approximate="tanh") * up, weights.matrix("down", h.dtype)))


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    found = llama_parameters(spec)
    norms = ("attention_norm", "ffn_norm")
    return found | {name: replace(found[name], initial=0.0, gguf_layout="offset") for name in norms}


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, norm_weight(weights, "attention_norm"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, delta, norm_weight(weights, "ffn_norm"), spec.norm_eps)
    return x, gelu_feed_forward(weights, ops, h)


GEMMA = ModelArchitecture(
    name="gemma",
    hf_model_type="gemma",
    hf_class="GemmaForCausalLM",
    hf_config={
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    # The first releases say "gelu" and mean the approximation; transformers before 5 reads hidden_activation.
    hf_synonyms={"hidden_act": ("gelu",), "hidden_activation": (None,), "use_bidirectional_attention": (False,)},
    hf_defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
        "head_dim": 256,
    },
    gguf="gemma",
    block_parameters=_parameters,
    block=_block,
    final_norm=lambda spec, vector, x: rms_norm(x, 1 + vector("norm").float(), spec.norm_eps),
    final_norm_initial=0.0,
    embedding_scale=lambda spec: spec.width**0.5,
)
