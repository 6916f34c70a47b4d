"""Mixtral: a Llama block whose feed-forward is a mixture of experts; Qwen3-MoE adds norms on queries and keys.

Token choice: a router sends each token to its `top_k` experts and weighs their outputs; no token is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.architectures.llama import attention, attention_parameters
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["MIXTRAL", "QWEN3_MOE", "mixture_of_experts"]

_MIXTRAL_NAMES = ("block_sparse_moe", "w1", "w3", "w2")
_QWEN_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    assert spec.experts is not None
    module, gate, up, down = _QWEN_NAMES if spec.qk_norm else _MIXTRAL_NAMES
    count, ffn, width, info = spec.experts.count, spec.experts.ffn, spec.width, ParameterInfo
    experts = f"{module}.experts.{{}}"
    return {
        "attention_norm": info((width,), "input_layernorm.weight", ""),
        **attention_parameters(spec),
        "ffn_norm": info((width,), "post_attention_layernorm.weight", ""),
        "ffn.router": info((count, width), f"{module}.gate.weight", ""),
        "ffn.gate": info((count, ffn, width), f"{experts}.{gate}.weight", "", 1, "gate_up"),
        "ffn.up": info((count, ffn, width), f"{experts}.{up}.weight", "", 1, "gate_up"),
        "ffn.down": info((count, width, ffn), f"{experts}.{down}.weight", "", 2, "down", True),
    }


def mixture_of_experts(spec: Model, weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    assert spec.experts is not None
    h = ops.enter(h)
    x_NW = h.flatten(0, -2)
    scores = F.linear(x_NW, weights.vector("ffn.router").to(h.dtype)).float().softmax(dim=-1)
    weight_NK, index_NK = scores.topk(spec.experts.top_k, dim=-1)
    if spec.experts.normalize:
        weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
    y = ops.experts(x_NW, weights.matrix("gate_up", h.dtype), weights.matrix("down", h.dtype), index_NK, weight_NK)
    return ops.leave(y.view_as(h))


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, mixture_of_experts(spec, weights, ops, h)


MIXTRAL = ModelArchitecture(
    name="mixtral",
    hf_model_type="mixtral",
    hf_class="MixtralForCausalLM",
    hf_config={"hidden_act": "silu", "router_jitter_noise": 0.0},
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    hf_experts={"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
    hf_windows="all",
    gguf=None,
    block_parameters=_parameters,
    block=_block,
)
QWEN3_MOE = replace(
    MIXTRAL,
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    hf_defaults={"norm_topk_prob": False},
    hf_experts={
        "count": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "normalize": "norm_topk_prob",
    },
    hf_windows="all",
)
